"""What INT8 keys and values cost: KL divergence and perplexity against f16 ones, of one model over texts.

    python benchmarks/int8_kl.py MODEL.gguf TEXT... [-c 512] [-n 4096] [--pinned 0] [--slide] [--json]

Each text is cut into windows of -c tokens, each read from an empty cache; every token but the first of a
window is scored. With --slide it goes through a ring of -c tokens as one stream. A text is a UTF-8 file, or
"pydoc": the topics of Python's help(), which come with every CPython.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import ringlm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "python"))
from kv_divergence import divergence


def text_of(name: str) -> str:
    if name != "pydoc":
        return Path(name).read_text(encoding="utf-8")
    from pydoc_data.topics import topics

    return "\n\n".join(topics[key] for key in sorted(topics))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("texts", nargs="+", metavar="TEXT")
    parser.add_argument("-c", "--ctx", type=int, default=512)
    parser.add_argument("-n", "--tokens", type=int, default=4096, help="of each text, from its beginning")
    parser.add_argument("--kv", default="int8", help="what is compared: int8, f16 or f32")
    parser.add_argument("--against", default="f16")
    parser.add_argument("--pinned", type=int, default=0)
    parser.add_argument("--slide", action="store_true")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--json", action="store_true", help="print one JSON object a text")
    args = parser.parse_args()
    width = max(len("text"), *(len(Path(name).name) for name in args.texts))
    if not args.json:
        print(
            f"{'text':{width}}  tokens  KL mean  KL median   KL max"
            f"  perplexity {args.against:>8} {args.kv:>9}     change"
        )
    with ringlm.Model(args.model, n_threads=args.threads) as model:
        for name in args.texts:
            # A tokenizer's work grows faster than the text: no more characters than can be needed.
            ids = model.tokenizer.encode(text_of(name)[: 16 * args.tokens])[: args.tokens]
            d = divergence(
                model, ids, args.against, args.kv, n_ctx=args.ctx, pinned=args.pinned, slide=args.slide
            )
            expected, found = d.perplexities
            mean, median, most = d.kl.mean(), np.median(d.kl), d.kl.max()
            if args.json:
                record = {
                    "text": name,
                    "tokens": len(ids),
                    "kl": {"mean": float(mean), "median": float(median), "max": float(most)},
                    "perplexity": {args.against: expected, args.kv: found},
                }
                print(json.dumps(record), flush=True)
                continue
            print(
                f"{Path(name).name:{width}}  {len(ids):6}  {mean:.1e}    {median:.1e}  {most:.1e}"
                f"           {expected:9.4f} {found:9.4f}  {100 * (found / expected - 1):+.4f} %",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
