"""A GGUF file written tensor by tensor beside its target and renamed when it is whole."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from io import BufferedWriter
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
from gguf.gguf_writer import WriterState

from ringlm._replace import replacing
from ringlm.rewrite import NewTensor, Progress, write_data


def write(
    target: Path,
    arch: str,
    metadata: Mapping[str, Any],
    tensors: Sequence[NewTensor],
    progress: Progress | None = None,
) -> int:
    """Write the file, whole or not at all, and return its size in bytes. Memory holds one piece of a tensor.

    Metadata keys that begin with ``general.`` or ``tokenizer.`` are whole, the others belong to `arch`.
    Integers are written as uint32, floats as float32. Raises OSError.
    """
    total = sum(t.nbytes for t in tensors)
    folder = os.path.dirname(os.path.realpath(target))
    free = shutil.disk_usage(folder).free
    if free < total:
        raise OSError(errno.ENOSPC, f"{total:,} bytes are needed, {free:,} are free", str(target))
    writer = gguf.GGUFWriter(None, arch)
    for key, value in metadata.items():
        _add(writer, key if key.startswith(("general.", "tokenizer.")) else f"{arch}.{key}", value)
    for t in tensors:
        type = gguf.GGMLQuantizationType[t.type]
        writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.nbytes, type)
    with replacing(str(target), private=False) as file:
        # The writer opens files by name; this one has its own.
        writer.fout, writer.state = [cast(BufferedWriter, file)], WriterState.EMPTY
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.write_padding(file, file.tell())
        write_data(file, tensors, writer.data_alignment, progress)
        return file.tell()


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
