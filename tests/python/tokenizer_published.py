"""What the ``tokenizer.json`` files of model families say of their normalizer and pre-tokenizer, by the name
that GGUF files carry in ``tokenizer.ggml.pre``."""

# ruff: noqa: RUF001  (the files spell out letters that look alike)

from __future__ import annotations

import json
from typing import Any

_BYTES = '{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}'
_WORDS = '{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}'
_DIGITS_WORDS = '{"type":"Digits","individual_digits":true},' + _WORDS


def _split(regex: str, behavior: str = "Isolated", invert: bool = False) -> str:
    pattern = {"Regex": regex}
    return json.dumps({"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert})


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# These two carry a carriage return and a line feed, not their escapes.
_DEEPSEEK_NEWLINE = _split("[\r\n]")
_DEEPSEEK_CJK = _split("[一-龥ࠀ-一가-퟿]+")
_DEEPSEEK_LETTERS = (
    "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbe"
    "ῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_DIGITS = '{"type":"Digits","individual_digits":true}'

# pre -> normalizer, steps of the pre-tokenizer, ignore_merges, whether BOS is put before a text
_PUBLISHED: dict[str, tuple[str, list[str], bool, bool]] = {
    "gpt-2": ("null", ['{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true}'], False, False),
    "phi-2": ("null", [_WORDS], False, False),
    "smollm": ("null", [_DIGITS_WORDS], False, False),
    "starcoder": ("null", [_DIGITS_WORDS], False, False),
    "refact": ("null", [_DIGITS_WORDS], False, False),
    "command-r": ('{"type":"NFC"}', [_DIGITS_WORDS], False, True),
    "olmo": ('{"type":"NFC"}', [_WORDS], False, False),
    "llama-bpe": ("null", [_split(_LLAMA3), _BYTES], True, True),
    "smaug-bpe": ("null", [_split(_LLAMA3), _BYTES], True, False),
    "dbrx": ("null", [_split(_LLAMA3, "Removed", True), _BYTES], False, False),
    "qwen2": ('{"type":"NFC"}', [_split(_QWEN2), _BYTES], False, False),
    "deepseek-r1-qwen": ('{"type":"NFC"}', [_split(_QWEN2), _BYTES], False, True),
    "qwen35": ('{"type":"NFC"}', [_split(_QWEN35), _BYTES], False, False),
    "tekken": ("null", [_split(_TEKKEN), _BYTES], True, True),
    "gpt-4o": ("null", [_split(_GPT4O), _BYTES], False, False),
    "falcon": (
        "null",
        [
            '{"type":"Punctuation","behavior":"Contiguous"}',
            _WORDS,
            '{"type":"Digits","individual_digits":false}',
            _split("[0-9][0-9][0-9]"),
        ],
        False,
        False,
    ),
    "deepseek-llm": (
        '{"type":"Sequence","normalizers":[]}',
        [
            _DEEPSEEK_NEWLINE,
            _split(_DEEPSEEK_LETTERS),
            _split("\\s?[!-/:-~！-／：-～‘-‟　-。]+"),
            _split("\\s+$"),
            _DEEPSEEK_CJK,
            _DIGITS,
            _BYTES,
        ],
        False,
        True,
    ),
    "deepseek-coder": (
        '{"type":"Sequence","normalizers":[]}',
        [
            _DEEPSEEK_NEWLINE,
            _split("\\s?\\p{L}+"),
            _split("\\s?\\p{P}+"),
            _DEEPSEEK_CJK,
            _DIGITS,
            _BYTES,
        ],
        False,
        True,
    ),
    "deepseek-v3": (
        '{"type":"Sequence","normalizers":[]}',
        [
            _split("\\p{N}{1,3}"),
            _split("[一-龥぀-ゟ゠-ヿ]+"),
            _split(
                "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
                "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
            ),
            _BYTES,
        ],
        False,
        True,
    ),
}
PUBLISHED = list(_PUBLISHED)


def published(pre: str, tokens: list[str], merges: list[str]) -> dict[str, Any]:
    """A ``tokenizer.json`` of this family with another vocabulary, as ``json.load`` returns it."""
    normalizer, steps, ignore_merges, add_bos = _PUBLISHED[pre]
    single = [{"SpecialToken": {"id": tokens[-1], "type_id": 0}}] if add_bos else []
    bos = (
        {tokens[-1]: {"id": tokens[-1], "ids": [len(tokens) - 1], "tokens": [tokens[-1]]}} if add_bos else {}
    )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": json.loads(normalizer),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": json.loads(f"[{','.join(steps)}]")},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*single, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": bos,
        },
        "decoder": json.loads(_WORDS),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }
