"""A GGUF file as llama.cpp's own quantizer makes Q4_K_M of it, for measuring.

    python benchmarks/requantize.py SRC.gguf OUT.gguf        # needs llama-cpp-python

Rows that are no multiple of 256 get another type. What SRC has lost stays lost: the result has the size and
speed of its type, not its quality. `ringlm quantize` makes the types that the gguf package can write.
"""

from __future__ import annotations

import argparse
import os
import sys


def requantize(source: str, out: str) -> None:
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    params.allow_requantize = True
    if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(out), params):
        raise SystemExit(f"llama.cpp does not quantize {source}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("out")
    args = parser.parse_args()
    requantize(args.source, args.out)
    print(f"{args.out}: {os.path.getsize(args.out):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
