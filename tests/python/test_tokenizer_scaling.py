"""Long text without a place to cut takes time in proportion to its length, for every kind of vocabulary.

Two lengths are timed, eight times apart. Quadratic work takes 64 times as long; allowed are 24.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from ringlm.pretokenizers import PRE_TOKENIZERS, build_splitter
from ringlm.tokenizer import Tokenizer
from tokenizer_data import BYTE, NORMAL, SENTENCES, SPACE, UNKNOWN, keyed, train_byte_level

RULES = {rules.steps: name for name, rules in PRE_TOKENIZERS.items()}
# What makes a pattern look again at what it has seen: runs, and runs that end in something else.
RUNS = ["a", "A", "1", " ", "\n", "'", "日", "\u0301", "ab", "ǅ\u0301", " \n"]
ENDS = ["", "x", "日"]
SHORT, LONG = 5_000, 40_000


def check_linear(work: Callable[[str], Any], unit: str, end: str, short: int, long: int) -> None:
    for _attempt in range(3):
        times = []
        for n in (short, long):
            text = unit * (n // len(unit)) + end
            start = time.process_time()
            work(text)
            times.append(time.process_time() - start)
        if times[1] < 24 * long / short / 8 * max(times[0], 0.002):
            return
    pytest.fail(f"{short} and {long} characters of {unit!r} and {end!r} take {times} s")


@pytest.mark.parametrize("name", RULES.values())
def test_cutting_into_words(name: str) -> None:
    splitter = build_splitter(PRE_TOKENIZERS[name])
    for unit in RUNS:
        for end in ENDS:
            check_linear(splitter.pre_tokenize_str, unit, end, SHORT, LONG)


def byte_level() -> dict[str, Any]:
    tokens, merges = train_byte_level(700)
    return {"model": "gpt2", "pre": "llama-bpe", "tokens": tokens, "merges": merges}


def characters() -> list[str]:
    """Letters, their pairs and pairs of pairs: pieces that overlap in every run."""
    letters = sorted({c for s in SENTENCES for c in s if c.isalpha()})[:60]
    pairs = [a + b for a in "abn" for b in "abn"]
    return [SPACE, *letters, *pairs, *(a + b for a in pairs for b in pairs), SPACE * 2, SPACE * 4]


def pieces(model: str) -> dict[str, Any]:
    found = list(dict.fromkeys(characters()))
    tokens = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *found]
    data = {
        "model": model,
        "tokens": tokens,
        "token_type": [UNKNOWN] + [BYTE] * 256 + [NORMAL] * len(found),
        "scores": [-1.0 - i / 7 for i in range(len(tokens))],
    }
    if model == "gemma4":
        known = set(found)
        data["merges"] = [
            f"{t[:k]} {t[k:]}" for t in found for k in range(1, len(t)) if t[:k] in known and t[k:] in known
        ]
    return data


@pytest.mark.parametrize("model", ["gpt2", "llama", "t5", "gemma4"])
def test_100_kilobytes_without_a_space(model: str) -> None:
    tokenizer = Tokenizer(keyed(byte_level() if model == "gpt2" else pieces(model)))
    ids: list[int] = []

    def encode(text: str) -> None:
        ids[:] = tokenizer.encode(text, add_special=False)

    for unit in ("an", "日", " "):
        check_linear(encode, unit, "", 12_500, 100_000)
        assert tokenizer.decode(ids).strip() == (unit * (100_000 // len(unit))).strip()


def test_user_defined_tokens_that_begin_alike() -> None:
    """A long run of what many tokens begin with, none of which is there."""
    tokens, merges = train_byte_level(300)
    names = ["<" * n + ">" for n in range(1, 40)]
    types = [NORMAL] * len(tokens) + [4] * len(names)
    data = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens + names, "token_type": types, "merges": merges}
    tokenizer = Tokenizer(keyed(data))
    check_linear(tokenizer.encode, "<", "", SHORT, LONG)
