r"""How byte-level vocabularies cut text into words before merging (``tokenizer.ggml.pre``).

The rules are those that the models were trained with, as published in their ``tokenizer.json`` files; the
names are those that llama.cpp's converter writes. A text goes through the steps of a rule one after the
other; what a step does not match stays as one part. ``\s``, ``\p{L}`` and ``\p{N}`` are Unicode's.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringlm.errors import UnsupportedModelError

if TYPE_CHECKING:
    import tokenizers

# A step is (kind, argument): "split" at the matches of a pattern; "digits", "each" or "runs" of them;
# "punctuation", in runs; "bytes", which spells words in GPT-2's byte characters. Steps behind "bytes" look
# at these characters and not at the text any more.
Step = tuple[str, str]

_BYTES = ("bytes", "")
_GPT2 = (
    "split",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
)
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_QWEN35 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES
# Words begin anew where a capital follows a small letter.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|\p{{N}}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
)
# Letters with a case, in the ranges that the published pattern spells out.
_DEEPSEEK_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_CJK = ("split", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")
_NEWLINE = ("split", r"[\r\n]")
# Published as \s+$, which tries every space of a long run anew, each time to its end.
_SPACE_AT_END = ("split", r"(?<!\s)\s+$")


@dataclass(frozen=True)
class PreTokenizer:
    """Rules of one ``tokenizer.ggml.pre``."""

    steps: tuple[Step, ...]
    nfc: bool = False  # text is brought to Unicode's normal form C first
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges say
    add_bos: bool = False  # where the file does not say


_GPT2_RULES = PreTokenizer((_GPT2, _BYTES))
_NEOX_RULES = PreTokenizer((_GPT2, _BYTES), nfc=True)
_DIGITS_RULES = PreTokenizer((("digits", "each"), _GPT2, _BYTES))
_LLAMA3_STEPS = (("split", _CL100K % "{1,3}"), _BYTES)
_LLAMA3_RULES = PreTokenizer(_LLAMA3_STEPS, ignore_merges=True, add_bos=True)
_QWEN2_RULES = PreTokenizer((("split", _CL100K % ""), _BYTES), nfc=True)
_GPT4O_RULES = PreTokenizer(
    (("split", _CASED_WORDS % (_CONTRACTION + "?", _CONTRACTION + "?", "{1,3}")), _BYTES)
)
_DEEPSEEK3_RULES = PreTokenizer(
    (
        ("split", r"\p{N}{1,3}"),
        ("split", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
        (
            "split",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES,
        ),
        _BYTES,
    )
)
# llama.cpp's rules for files whose converter did not know the model's.
_DEFAULT_RULES = PreTokenizer(
    (
        ("split", r"[\p{P}$+<=>^~|]+"),
        _GPT2,
        ("digits", "runs"),
        ("split", "[0-9][0-9][0-9]"),
        _BYTES,
    )
)

# The first name of equal rules is the one that `name_of` gives. Some of the others are here because llama.cpp
# takes them for the same rule (docs/text.md lists them).
PRE_TOKENIZERS = {
    "gpt-2": _GPT2_RULES,
    "phi-2": _GPT2_RULES,
    "mellum": _GPT2_RULES,
    "trillion": _GPT2_RULES,
    "granite-docling": _GPT2_RULES,
    "olmo": _NEOX_RULES,
    "mpt": _NEOX_RULES,
    "smollm": _DIGITS_RULES,
    "starcoder": _DIGITS_RULES,
    "refact": _DIGITS_RULES,
    "codeshell": _DIGITS_RULES,
    "exaone": _DIGITS_RULES,
    "minerva-7b": _DIGITS_RULES,
    "command-r": PreTokenizer(_DIGITS_RULES.steps, nfc=True),
    "llama-bpe": _LLAMA3_RULES,
    "llama-v3": _LLAMA3_RULES,
    "llama3": _LLAMA3_RULES,
    "falcon3": _LLAMA3_RULES,
    "falcon-h1": _LLAMA3_RULES,
    "lfm2": _LLAMA3_RULES,
    "midm-2.0": _LLAMA3_RULES,
    "pixtral": _LLAMA3_RULES,
    # Llama 3's vocabulary without BOS (SmolLM3).
    "smaug-bpe": PreTokenizer(_LLAMA3_STEPS, ignore_merges=True),
    # GPT-4's vocabulary (Phi-4, OLMo 2, Granite 4).
    "dbrx": PreTokenizer(_LLAMA3_STEPS),
    "qwen2": _QWEN2_RULES,
    "deepseek-r1-qwen": _QWEN2_RULES,
    "kormo": _QWEN2_RULES,
    "megrez": _QWEN2_RULES,
    "qwen35": PreTokenizer((("split", _QWEN35), _BYTES), nfc=True),
    "tekken": PreTokenizer(
        (("split", _CASED_WORDS % ("", "", "")), _BYTES), ignore_merges=True, add_bos=True
    ),
    "gpt-4o": _GPT4O_RULES,
    "llama4": _GPT4O_RULES,
    "falcon": PreTokenizer(
        (("punctuation", "runs"), _GPT2, _BYTES, ("digits", "runs"), ("split", "[0-9][0-9][0-9]"))
    ),
    "deepseek-llm": PreTokenizer(
        (
            _NEWLINE,
            ("split", rf"\s?[{_DEEPSEEK_LETTERS}]+"),
            ("split", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
            _SPACE_AT_END,
            _DEEPSEEK_CJK,
            ("digits", "each"),
            _BYTES,
        )
    ),
    "deepseek-coder": PreTokenizer(
        (
            _NEWLINE,
            ("split", r"\s?\p{L}+"),
            ("split", r"\s?\p{P}+"),
            _DEEPSEEK_CJK,
            ("digits", "each"),
            _BYTES,
        )
    ),
    "deepseek-v3": _DEEPSEEK3_RULES,
    "hunyuan-dense": _DEEPSEEK3_RULES,
    "joyai-llm": _DEEPSEEK3_RULES,
}


def find_pre_tokenizer(name: str | None) -> PreTokenizer:
    """The rules of this name. None and "default" are files whose converter did not know: what llama.cpp
    does with them, with a warning, because a wrong guess degrades the answers without any error.

    Raises UnsupportedModelError for an unknown name.
    """
    if name in (None, "default"):
        warnings.warn(
            f"the file does not name its pre-tokenizer (tokenizer.ggml.pre is {name!r}); using llama.cpp's "
            "default. If answers look worse than they should, convert the model again",
            stacklevel=3,
        )
        return _DEFAULT_RULES
    try:
        return PRE_TOKENIZERS[name or ""]
    except KeyError:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre is {name!r}; supported are {', '.join(supported_names())}"
        ) from None


def supported_names() -> list[str]:
    """Every value of ``tokenizer.ggml.pre`` that has rules, sorted."""
    return sorted([*PRE_TOKENIZERS, "default"])


def build_splitter(rules: PreTokenizer) -> tokenizers.pre_tokenizers.PreTokenizer:
    """The rules as a step of Hugging Face ``tokenizers``: words, in GPT-2's byte characters."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([_build_step(kind, argument) for kind, argument in rules.steps])


def _build_step(kind: str, argument: str) -> tokenizers.pre_tokenizers.PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    if kind == "split":
        return pre_tokenizers.Split(Regex(argument), "isolated")
    if kind == "digits":
        return pre_tokenizers.Digits(individual_digits=argument == "each")
    if kind == "punctuation":
        return pre_tokenizers.Punctuation("contiguous")
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


# -- from tokenizer.json --

# Other spellings of a step that cut every text at the same places.
_SAME_STEP: dict[Step, Step] = {
    ("split", r"\p{N}"): ("digits", "each"),
    ("split", r"\p{N}+"): ("digits", "runs"),
    ("split", r"\s+$"): _SPACE_AT_END,
}
_POSSESSIVE = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SAME_STEP.update((("split", _POSSESSIVE % n), ("split", _CL100K % n)) for n in ("", "{1,3}"))


def name_of(tokenizer_json: Mapping[str, Any]) -> str:
    """The ``tokenizer.ggml.pre`` whose rules are those of a parsed ``tokenizer.json``.

    Compared are the normalizer and the steps of the pre-tokenizer. Of names with these steps the one that
    treats merges the same way (``ignore_merges``) is preferred, then the one that puts BOS before a text
    like the post-processor does.

    Raises UnsupportedModelError, which names what was found: a vocabulary that is no byte-level BPE, a
    normalizer or a pre-tokenizer that no name stands for.
    """
    model = tokenizer_json.get("model") or {}
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind != "BPE" or model.get("byte_fallback"):
        found = "BPE with byte_fallback (SentencePiece)" if kind == "BPE" else kind
        raise UnsupportedModelError(
            f"the model in tokenizer.json is {found}; only byte-level BPE has a tokenizer.ggml.pre"
        )
    normalizers = list(_flat(tokenizer_json.get("normalizer"), "normalizers"))
    if [n.get("type") for n in normalizers] not in ([], ["NFC"]):
        raise UnsupportedModelError(
            f"the normalizer in tokenizer.json is {tokenizer_json['normalizer']!r}; supported: none and NFC"
        )
    steps: list[Step] = []
    for part in _flat(tokenizer_json.get("pre_tokenizer"), "pretokenizers"):
        steps += _steps_of(part)
    wanted = (_merged(steps), bool(normalizers))
    names = [name for name, rules in PRE_TOKENIZERS.items() if (rules.steps, rules.nfc) == wanted]
    if not names:
        raise UnsupportedModelError(
            f"no tokenizer.ggml.pre has the pre-tokenizer {tokenizer_json.get('pre_tokenizer')!r} with the "
            f"normalizer {tokenizer_json.get('normalizer')!r}; supported are {', '.join(supported_names())}"
        )
    ignore_merges = bool(model.get("ignore_merges", False))
    add_bos = any(
        "SpecialToken" in piece
        for part in _flat(tokenizer_json.get("post_processor"), "processors")
        for piece in (part.get("single") or [])[:1]
    )

    def unlike(name: str) -> tuple[bool, bool]:
        rules = PRE_TOKENIZERS[name]
        return rules.ignore_merges != ignore_merges, rules.add_bos != add_bos

    return min(names, key=unlike)


def _flat(part: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """The parts of nested sequences, in order."""
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [leaf for child in part.get(inner) or [] for leaf in _flat(child, inner)]
    return [part]


def _steps_of(part: Mapping[str, Any]) -> list[Step]:
    """One pre-tokenizer of tokenizer.json as steps."""
    kind = part.get("type")
    behavior = str(part.get("behavior", "")).lower()
    if kind == "ByteLevel" and not part.get("add_prefix_space", True):
        return [_GPT2, _BYTES] if part.get("use_regex", True) else [_BYTES]
    if kind == "Digits":
        return [("digits", "each" if part.get("individual_digits") else "runs")]
    if kind == "Punctuation" and behavior == "contiguous":
        return [("punctuation", "runs")]
    if kind == "Split" and "Regex" in (part.get("pattern") or {}):
        # Some files carry the two characters themselves in place of their escapes.
        pattern = part["pattern"]["Regex"].replace("\r", r"\r").replace("\n", r"\n")
        step = _SAME_STEP.get(("split", pattern), ("split", pattern))
        # Matches as words, or all but the matches removed: the same where every character is matched.
        if behavior == "isolated" or (
            behavior == "removed" and part.get("invert") and step[1].endswith(r"|\s+")
        ):
            return [step]
    raise UnsupportedModelError(
        f"a pre-tokenizer in tokenizer.json is {dict(part)!r}; supported are those of "
        + ", ".join(supported_names())
    )


def _merged(steps: list[Step]) -> tuple[Step, ...]:
    """Steps without a second spelling in bytes, which changes nothing."""
    first = steps.index(_BYTES) + 1 if _BYTES in steps else len(steps)
    return (*steps[:first], *(s for s in steps[first:] if s != _BYTES))
