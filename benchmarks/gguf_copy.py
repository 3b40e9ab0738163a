"""The metadata of a GGUF file in another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import gguf


def copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    """All keys but the architecture, which the writer has been made with, and the type of the weights."""
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", "general.file_type"):
            element = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=element)
