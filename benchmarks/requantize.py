"""A GGUF file with its matrices in another type, for measuring.

    python benchmarks/requantize.py SRC.gguf OUT.gguf --type q4_0|q8_0|f16        # needs the gguf package
    python benchmarks/requantize.py SRC.gguf OUT.gguf --type q4_k_m               # needs llama-cpp-python

Matrices are dequantized and quantized anew by the `gguf` package; vectors and all metadata are as they were.
What SRC has lost stays lost: the result has the size and speed of its type, not its quality. q4_k_m is what
llama.cpp's own quantizer makes of the file (which takes another type where rows are no multiple of 256).
"""

from __future__ import annotations

import argparse
import os
import sys

from gguf_copy import copy_metadata

TYPES = {"q4_0": "Q4_0", "q8_0": "Q8_0", "f16": "F16"}


def requantize(source: str, out: str, name: str) -> None:
    import gguf

    wanted = gguf.GGMLQuantizationType[TYPES[name]]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, str(reader.fields["general.architecture"].contents()))
    copy_metadata(reader, writer)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{TYPES[name]}"])
    block = gguf.GGML_QUANT_SIZES[wanted][0]
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) < 2:
            writer.add_tensor(tensor.name, values)
        elif tensor.shape[0] % block:
            raise SystemExit(
                f"{tensor.name} has rows of {tensor.shape[0]}, and {name} takes multiples of {block}"
            )
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def by_llama_cpp(source: str, out: str) -> None:
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
    parser.add_argument("--type", required=True, choices=(*TYPES, "q4_k_m"))
    args = parser.parse_args()
    if args.type == "q4_k_m":
        by_llama_cpp(args.source, args.out)
    else:
        requantize(args.source, args.out, args.type)
    print(f"{args.out}: {os.path.getsize(args.out):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
