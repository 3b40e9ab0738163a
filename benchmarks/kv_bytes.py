"""Bytes of the K/V cache for the heads of real models: the formula, what a session says, what it takes.

    python benchmarks/kv_bytes.py [-c 4096] [--chunk 128] [--kv f16 int8]

The models are hollow: layers, heads and head size of the real ones, everything else tiny and zero, since
nothing else matters for the cache. "resident" is how much resident memory of this process grows when the
session opens. Prints a Markdown table. Exit code 1 if the formula is not what the session says, or if it is
more than 64 KiB off what the session takes: memory comes in pages, and small parts from a heap that is there.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from ringlm import _core
from soak import resident

SLACK = 64 * 2**10


@dataclass(frozen=True)
class Heads:
    name: str
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int

    @property
    def kind(self) -> str:
        return {self.n_head: "MHA", 1: "MQA"}.get(self.n_head_kv, "GQA")


MODELS = [
    Heads("Llama-2-7B", 32, 32, 32, 128),
    Heads("Qwen2.5-7B", 28, 28, 4, 128),
    Heads("Gemma-2B", 18, 8, 1, 256),
]


def write_hollow(path: Path, heads: Heads, n_ctx_train: int) -> None:
    """A model with these heads, 32 wide, of zeros in Q4_0."""
    width, n_vocab = 32, 32
    w = gguf.GGUFWriter(path, "llama")
    w.add_context_length(n_ctx_train)
    w.add_embedding_length(width)
    w.add_block_count(heads.n_layer)
    w.add_feed_forward_length(width)
    w.add_head_count(heads.n_head)
    w.add_head_count_kv(heads.n_head_kv)
    w.add_key_length(heads.head_dim)
    w.add_value_length(heads.head_dim)
    w.add_rope_dimension_count(heads.head_dim)
    w.add_layer_norm_rms_eps(1e-5)

    def matrix(name: str, rows: int, cols: int) -> None:
        zeros = np.zeros((rows, cols // 32 * 18), np.uint8)
        w.add_tensor(name, zeros, raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def norm(name: str) -> None:
        w.add_tensor(name, np.ones(width, np.float32))

    q, kv = heads.n_head * heads.head_dim, heads.n_head_kv * heads.head_dim
    matrix("token_embd.weight", n_vocab, width)
    norm("output_norm.weight")
    for i in range(heads.n_layer):
        p = f"blk.{i}."
        norm(p + "attn_norm.weight")
        norm(p + "ffn_norm.weight")
        matrix(p + "attn_q.weight", q, width)
        matrix(p + "attn_k.weight", kv, width)
        matrix(p + "attn_v.weight", kv, width)
        matrix(p + "attn_output.weight", width, q)
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            matrix(f"{p}{name}.weight", width, width)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def formula(heads: Heads, kv: str, n_ctx: int, chunk: int) -> int:
    """Layers x KV heads x (K row + V row, scales included) x slots."""
    row = {"f32": 4 * heads.head_dim, "f16": 2 * heads.head_dim, "int8": heads.head_dim + 2}[kv]
    return heads.n_layer * heads.n_head_kv * 2 * row * (n_ctx + chunk - 1)


@dataclass(frozen=True)
class Found:
    formula: int
    kv_nbytes: int
    nbytes: int
    resident: int

    @property
    def good(self) -> bool:
        return self.formula == self.kv_nbytes and abs(self.resident - self.nbytes) <= SLACK


def measure(path: Path, heads: Heads, kv: str, n_ctx: int, chunk: int) -> Found:
    model = _core.Model(path, 1, "cpu")
    _core.Session(model, 1, kv, kv, 1).close()  # what the first session of a process brings along
    gc.collect()
    before = resident()
    session = _core.Session(model, n_ctx, kv, kv, chunk)
    grown = resident() - before
    found = Found(formula(heads, kv, n_ctx, chunk), session.kv_nbytes, session.nbytes, grown)
    session.close()
    model.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-c", "--ctx", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--kv", nargs="+", default=["f16", "int8"], choices=("int8", "f16", "f32"))
    args = parser.parse_args()
    slots = args.ctx + args.chunk - 1
    print(f"{args.ctx} tokens, chunk {args.chunk}: {slots} slots in every layer\n")
    columns = ("heads of", "layers", "query / KV heads", "head size", "K/V", "formula")
    print("| " + " | ".join((*columns, "`kv_nbytes`", "`nbytes`", "resident")) + " |")
    print("|---|--:|--:|--:|---|--:|--:|--:|--:|")
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for heads in MODELS:
            path = Path(folder, f"{heads.name}.gguf")
            write_hollow(path, heads, args.ctx)
            for kv in args.kv:
                found = measure(path, heads, kv, args.ctx, args.chunk)
                good &= found.good
                numbers = (found.formula, found.kv_nbytes, found.nbytes, found.resident)
                print(
                    f"| {heads.name} ({heads.kind}) | {heads.n_layer} | {heads.n_head} / {heads.n_head_kv} "
                    f"| {heads.head_dim} | {kv} | " + " | ".join(f"{n:,}" for n in numbers) + " |",
                    flush=True,
                )
    if not good:
        print("\nNOT what the formula says", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
