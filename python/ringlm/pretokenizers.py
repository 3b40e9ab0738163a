"""How byte-level vocabularies cut text into words before merging (``tokenizer.ggml.pre``).

The patterns are those that the models were trained with, as published in the ``tokenizer.json`` files of
GPT-2, SmolLM, Llama 3 and Qwen2. Text is cut by one pattern after the other; what a pattern does not
match stays as one part. ``\\s``, ``\\p{L}`` and ``\\p{N}`` are Unicode's.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringlm.errors import UnsupportedModelError

if TYPE_CHECKING:
    import tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """Rules of one ``tokenizer.ggml.pre``."""

    patterns: tuple[str, ...]
    nfc: bool = False  # text is brought to Unicode's normal form C first
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges say
    add_bos: bool = False  # where the file does not say


_GPT2_RULES = PreTokenizer((_GPT2,))
_SMOLLM_RULES = PreTokenizer((_DIGIT, _GPT2))
_LLAMA3_RULES = PreTokenizer((_CL100K % "{1,3}",), ignore_merges=True, add_bos=True)
_QWEN2_RULES = PreTokenizer((_CL100K % "",), nfc=True)

PRE_TOKENIZERS = {
    "gpt-2": _GPT2_RULES,
    "smollm": _SMOLLM_RULES,
    "llama-bpe": _LLAMA3_RULES,
    "llama-v3": _LLAMA3_RULES,
    "llama3": _LLAMA3_RULES,
    "qwen2": _QWEN2_RULES,
}


def find_pre_tokenizer(name: str | None) -> PreTokenizer:
    """The rules of this name. None and "default" are files whose converter did not know: GPT-2's, with a
    warning, because a wrong guess degrades the answers without any error.

    Raises UnsupportedModelError for an unknown name.
    """
    if name in (None, "default"):
        warnings.warn(
            f"the file does not name its pre-tokenizer (tokenizer.ggml.pre is {name!r}); using gpt-2. "
            "If answers look worse than they should, convert the model again",
            stacklevel=3,
        )
        return _GPT2_RULES
    try:
        return PRE_TOKENIZERS[name or ""]
    except KeyError:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre is {name!r}; known are {', '.join(sorted(PRE_TOKENIZERS))}"
        ) from None


def build_splitter(rules: PreTokenizer) -> tokenizers.pre_tokenizers.PreTokenizer:
    """The rules as a step of Hugging Face ``tokenizers``: words, in GPT-2's byte characters."""
    from tokenizers import Regex, pre_tokenizers

    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)
