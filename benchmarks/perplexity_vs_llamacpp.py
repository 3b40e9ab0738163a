"""Perplexity of one model over one text by ringlm and by llama.cpp, with the same definition.

    pip install llama-cpp-python
    python benchmarks/perplexity_vs_llamacpp.py MODEL.gguf TEXT [-c 512] [-t 2]

llama.cpp gives tokens and logits; what is computed from them is written here once more, so that ringlm's own
code has no part in its figure. Where llama-cpp-python lives in another environment, --llamacpp-python names
its interpreter; it runs this file with --child and needs nothing of ringlm there.

llama.cpp rounds activations to 8 bits where it multiplies them with quantized weights, ringlm to 16. With
--float32 llama.cpp gets the same weights dequantized (by the `gguf` package, into a temporary file), and
computes in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gguf_copy import copy_metadata


def by_llamacpp(model: str, text: bytes, n_ctx: int, threads: int, kv: str) -> dict[str, Any]:
    """Windows of n_ctx tokens; the second half is scored, each window from an empty cache."""
    import llama_cpp
    import numpy as np

    # Weights as they lie in the file: not every machine that announces AMX lets a process use it.
    params = llama_cpp.llama_model_default_params()
    params.use_extra_bufts = False
    llama_cpp.llama_cpp.llama_model_default_params = lambda: params
    kind = {"f16": llama_cpp.GGML_TYPE_F16, "f32": llama_cpp.GGML_TYPE_F32}[kv]
    began = time.perf_counter()
    llama = llama_cpp.Llama(
        model, n_ctx=n_ctx, n_batch=n_ctx, n_threads=threads, n_threads_batch=threads, logits_all=True,
        type_k=kind, type_v=kind, verbose=False,
    )  # fmt: skip
    vocab = llama_cpp.llama_model_get_vocab(llama.model)
    ids = llama.tokenize(text, add_bos=True, special=False)
    scores = []
    for start in range(0, len(ids) - n_ctx + 1, n_ctx):
        window = ids[start : start + n_ctx]
        if llama_cpp.llama_vocab_get_add_bos(vocab):
            window[0] = llama.token_bos()
        llama.reset()
        llama.eval(window)
        logits = np.array(llama.scores[n_ctx // 2 : n_ctx - 1], dtype=np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        scored = window[n_ctx // 2 + 1 :]
        chosen = logits[np.arange(len(scored)), scored]
        scores.append(np.log(np.exp(logits).sum(axis=1)) - chosen)
    nll = np.concatenate(scores)
    value = math.exp(nll.mean())
    return {
        "version": llama_cpp.__version__,
        "perplexity": value,
        "stderr": value * nll.std(ddof=1) / math.sqrt(len(nll)),
        "tokens": len(nll),
        "text_tokens": len(ids),
        "seconds": time.perf_counter() - began,
    }


def write_float32(model: str, path: Path) -> None:
    """The model with every tensor dequantized to float32, all metadata as they are."""
    import gguf

    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    copy_metadata(reader, writer)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def by_ringlm(model: str, text: str, n_ctx: int, threads: int, kv: str) -> dict[str, Any]:
    import ringlm
    from ringlm.perplexity import perplexity

    with ringlm.Model(model, n_threads=threads) as opened:
        ids = opened.tokenizer.encode(text)
        r = perplexity(opened, ids, n_ctx=n_ctx, kv=kv)
    return {
        "version": ringlm.__version__,
        "perplexity": r.perplexity,
        "stderr": r.stderr,
        "tokens": r.tokens,
        "text_tokens": len(ids),
        "seconds": r.seconds,
    }


def main() -> int:
    """0 if the two agree within --tolerance, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("text", help="a UTF-8 text file")
    parser.add_argument("-c", "--ctx", type=int, default=512)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--kv", choices=("f16", "f32"), default="f16")
    parser.add_argument("--tolerance", type=float, default=0.005, help="largest relative difference")
    parser.add_argument("--llamacpp-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--float32", action="store_true", help="dequantize the weights for llama.cpp")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    raw = Path(args.text).read_bytes()
    if args.child:
        print(json.dumps(by_llamacpp(args.model, raw, args.ctx, args.threads, args.kv)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if args.float32:
            model = str(Path(folder, "float32.gguf"))
            write_float32(args.model, Path(model))
        command = [args.llamacpp_python, __file__, "--child", model, args.text]
        command += ["-c", str(args.ctx), "-t", str(args.threads), "--kv", args.kv]
        output = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    theirs = json.loads(output.splitlines()[-1])
    ours = by_ringlm(args.model, raw.decode("utf-8"), args.ctx, args.threads, args.kv)
    weights = ", float32 weights for llama.cpp" if args.float32 else ""
    print(f"{args.text}: {len(raw)} bytes, windows of {args.ctx}, K/V {args.kv}{weights}")
    for name, r in (("ringlm", ours), ("llama-cpp-python", theirs)):
        print(
            f"{name} {r['version']}: perplexity {r['perplexity']:.4f} +/- {r['stderr']:.4f}, "
            f"{r['tokens']} of {r['text_tokens']} tokens scored, {r['seconds']:.1f} s"
        )
    difference = ours["perplexity"] / theirs["perplexity"] - 1
    agree = abs(difference) <= args.tolerance and ours["text_tokens"] == theirs["text_tokens"]
    print(f"difference {difference:+.3%}: {'within' if agree else 'NOT within'} {args.tolerance:.1%}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
