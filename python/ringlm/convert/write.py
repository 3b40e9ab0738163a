"""A GGUF file written tensor by tensor beside its target and renamed when it is whole."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from .plan import Output

Progress = Callable[[int, int], None]  # bytes written so far, of how many


def write(
    target: Path,
    arch: str,
    metadata: dict[str, Any],
    outputs: Sequence[Output],
    progress: Progress | None = None,
) -> int:
    """Write the file and return its size in bytes. Only this much memory is taken: a block of one tensor.

    Metadata keys that begin with ``general.`` or ``tokenizer.`` are whole, the others belong to `arch`. Integers are
    written as uint32, floats as float32. Raises OSError; nothing of a file that is not whole remains.
    """
    total = sum(output.nbytes for output in outputs)
    folder = target.parent
    free = shutil.disk_usage(folder).free
    if free < total:
        raise OSError(errno.ENOSPC, f"{total:,} bytes are needed, {free:,} are free", str(folder))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        writer = gguf.GGUFWriter(temporary, arch)
        try:
            for key, value in metadata.items():
                whole = key.startswith(("general.", "tokenizer."))
                _add(writer, key if whole else f"{arch}.{key}", value)
            for output in outputs:
                writer.add_tensor_info(
                    output.name, output.shape, np.dtype(np.float32), output.nbytes, output.type
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            assert writer.fout is not None
            file = writer.fout[0]
            done = 0
            writer.write_padding(file, file.tell())
            for output in outputs:
                for block in output.blocks():
                    file.write(np.ascontiguousarray(block).data)
                    done += block.nbytes
                    if progress is not None:
                        progress(done, total)
                writer.write_padding(file, output.nbytes)
            assert done == total
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        finally:
            writer.close()
        os.replace(temporary, target)
    except OSError as e:
        if e.filename in (str(temporary), temporary):  # of no interest: the temporary name
            e.filename, e.filename2 = str(target), None
        raise
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
    return size


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
