"""The recipes of models/recipes.toml as GGUF files, with what transformers computes of them.

Files are made once in a test run: by transformers, as a checkpoint, and from that by `ringlm convert`.
`python tests/python/families.py` prints the largest error of each.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import recipes
from random_llama import worst
from ringlm import _core
from ringlm.convert import convert

Array = np.ndarray

#: Windows are shorter than 25 tokens and LongRoPE switches at 48: this text crosses both.
N_TOKENS = 100


@dataclass(frozen=True)
class Made:
    reference: Any  #: the model of transformers, in float64
    path: Path
    tokens: list[int]

    def expected(self, n: int = N_TOKENS) -> Array:
        """Logits [n, n_vocab] of the first n tokens, read at once."""
        return _expected(self.path, n)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ringlm-families-")


@functools.cache
def made(name: str) -> Made:
    reference = recipes.build(name)
    folder = Path(_folder().name)
    path = folder / f"{name}.gguf"
    with tempfile.TemporaryDirectory() as checkpoint:
        recipes.save(reference, name, Path(checkpoint) / name)
        convert(Path(checkpoint) / name, path, type="f32", tokenizer=False)
    tokens = np.random.default_rng(7).integers(0, reference.get_input_embeddings().num_embeddings, N_TOKENS)
    result = Made(reference, path, tokens.tolist())
    _by_path[path] = result
    return result


_by_path: dict[Path, Made] = {}


@functools.cache
def _expected(path: Path, n: int) -> Array:
    m = _by_path[path]
    return recipes.reference_logits(m.reference, m.tokens[:n])


def forget() -> None:
    """Removes the files."""
    _folder().cleanup()
    for cached in (made, _folder, _expected):
        cached.cache_clear()
    _by_path.clear()


def session(path: Path, backend: str = "cpu", chunk: int = 17, rope: Any = None) -> tuple[Any, Array]:
    """A session in float32, and room for one row of logits."""
    model = _core.Model(str(path), 2, backend, rope=rope)
    row = np.full(model.config.n_vocab, np.nan, np.float32)
    return _core.Session(model, n_ctx=128, kv_k="f32", kv_v="f32", chunk=chunk), row


def read_at_once(
    path: Path, tokens: list[int], backend: str = "cpu", chunk: int = 17, rope: Any = None
) -> Array:
    """Logits [n_tokens, n_vocab]."""
    s, row = session(path, backend, chunk, rope)
    out = np.full((len(tokens), len(row)), np.nan, np.float32)
    s.prefill(np.array(tokens, np.int32), out, all_logits=True)
    return out


def errors(name: str, backend: str = "cpu") -> list[float]:
    """Largest difference over largest logit, of a text that stays below LongRoPE's switch and of one that
    does not."""
    m = made(name)
    return [worst(read_at_once(m.path, m.tokens[:n], backend), m.expected(n)) for n in (40, N_TOKENS)]


Change = Callable[[dict[str, Any], dict[str, Array]], None]


def edited(path: Path, to: Path, change: Change) -> Path:
    """A copy whose metadata (keys without the architecture's name) and tensors `change` has altered."""
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    fields = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    metadata = {k.removeprefix(architecture + "."): f.contents() for k, f in fields.items()}
    types = {k.removeprefix(architecture + "."): f.types for k, f in fields.items()}
    tensors = {t.name: np.array(t.data) for t in reader.tensors}
    change(metadata, tensors)
    writer = gguf.GGUFWriter(to, metadata.pop("general.architecture"))
    for key, value in metadata.items():
        name = key if key.startswith(("general.", "tokenizer.")) else f"{writer.arch}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, (bool, str)):
            (writer.add_bool if isinstance(value, bool) else writer.add_string)(name, value)
        else:
            is_float = types.get(key, [gguf.GGUFValueType.FLOAT32])[0] == gguf.GGUFValueType.FLOAT32
            (writer.add_float32 if is_float else writer.add_uint32)(name, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


if __name__ == "__main__":
    print(
        f"{'recipe':28} {'architecture':12} {'layers':>6} {'heads':>6} {'group':>5} {'width':>5}  worst error"
    )
    for name in recipes.names():
        c = _core.Model(str(made(name).path), 1).config
        shape = f"{c.n_layer:6} {c.n_head:6} {c.group:5} {c.head_dim:5}"
        print(f"{name:28} {c.architecture:12} {shape}  {max(errors(name)):.1e}")
    forget()
