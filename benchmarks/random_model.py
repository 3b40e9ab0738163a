"""Writes a llama of random blocks in any weight type: for measurements that need bytes, not sense.

    python benchmarks/random_model.py OUT.gguf [--type Q4_K] [--head-type Q6_K]
        [--tensor ffn_down.weight=Q6_K] [--n-embd 1280] [--n-layer 28] ...

Weights are drawn as codes and scales, scaled so that activations stay of order 1; norms are F32. The file
depends on the arguments alone. The default shape has rows that are multiples of 256, four query heads to a KV
head, and 329 MB in Q4_K, of which a step reads 305 MB (all but the embeddings). Its vocabulary is bytes and
letters, so that ringlm and llama.cpp open it like any other model.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "python"))
from block_llama import vocabulary, write_block_llama
from random_blocks import READABLE
from random_llama import Shape

SHAPE = Shape(
    n_vocab=32768, n_embd=1280, n_layer=28, n_head=20, n_head_kv=5, head_dim=64, n_ff=3584, n_ctx_train=8192
)
SIZES = ("n_vocab", "n_embd", "n_layer", "n_head", "n_head_kv", "head_dim", "n_ff", "n_ctx_train", "seed")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument(
        "--type", default="Q4_K", choices=READABLE, help="of every matrix (default %(default)s)"
    )
    parser.add_argument("--head-type", choices=READABLE, help="of the output matrix")
    parser.add_argument("--embedding-type", choices=READABLE)
    parser.add_argument(
        "--tensor",
        action="append",
        default=[],
        metavar="END=TYPE",
        help="type of matrices with names so ending",
    )
    parser.add_argument("--tied", action="store_true", help="no output matrix: the embeddings serve as one")
    for name in SIZES:
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=int,
            default=getattr(SHAPE, name),
            metavar="N",
            help="%(default)s",
        )
    args = parser.parse_args()
    types = {"output.weight": args.head_type, "token_embd.weight": args.embedding_type}
    types = {name: kind or args.type for name, kind in types.items()}
    for rule in args.tensor:
        end, _, kind = rule.partition("=")
        if not end or kind not in READABLE:
            parser.error(f"--tensor {rule}: expected END=TYPE with a type of {', '.join(READABLE)}")
        types[end] = kind
    shape = SHAPE.with_(
        types=types | {"default": args.type}, tied=args.tied, **{name: getattr(args, name) for name in SIZES}
    )
    if shape.n_head % shape.n_head_kv:
        parser.error(f"{shape.n_head} heads are no multiple of {shape.n_head_kv} KV heads")
    try:
        parts = write_block_llama(
            args.out, shape, vocabulary(shape.n_vocab) | {"general.name": args.out.stem}
        )
    except ValueError as e:
        parser.error(str(e))
    sizes: Counter[str] = Counter()
    for t in parts:
        sizes[t.kind.name] += t.nbytes
    print(f"{args.out}: {', '.join(f'{n / 1e6:.1f} MB in {kind}' for kind, n in sizes.most_common())}")


if __name__ == "__main__":
    main()
