"""Marks of characters: they come off, every operation keeps them, and what is read is the plain text."""

from __future__ import annotations

import json
import random
from typing import Any

from ringlm._provenance import METHODS, clean, is_marked, mark, mark_data, plain, runs, to_json


def mixed(rng: random.Random, letters: str) -> str:
    text = "".join(rng.choice(letters) for _ in range(rng.randrange(0, 12)))
    return "".join(mark(c) if rng.random() < 0.5 else c for c in text)


def test_marks_come_off_and_every_character_has_one() -> None:
    for code in [
        *range(0x300),
        0xD7FF,
        0xE000,
        0xFFFF,
        0x10000,
        0x1F642,
        0x3FFFF,
        0xE0000,
        0xEFFFF,
        0xF0000,
        0x10FFFF,
    ]:
        char = chr(code)
        assert (
            not is_marked(char)
            and is_marked(mark(char))
            and plain(mark(char)) == char
            and mark(mark(char)) == mark(char)
        )
    assert clean("\ud83d\U00051234") == "\ufffd\ufffd"


def test_methods_agree_with_str_and_keep_marks() -> None:
    rng = random.Random(5)
    letters = "aAb  \n\tßİé日'1<"
    calls: list[tuple[str, tuple[Any, ...]]] = [
        *(
            (name, ())
            for name in ("split", "rsplit", "splitlines", "strip", "lstrip", "rstrip", "lower", "upper")
        ),
        *(
            (name, ())
            for name in ("title", "capitalize", "swapcase", "casefold", "isalpha", "isupper", "isspace")
        ),
        *(
            (name, ("a",))
            for name in ("split", "rsplit", "partition", "rpartition", "strip", "count", "find", "rfind")
        ),
        *(
            (name, ("ab",))
            for name in ("split", "startswith", "endswith", "removeprefix", "removesuffix", "lstrip")
        ),
        *((name, (None, 1)) for name in ("split", "rsplit")),
        *((name, ("a", 1)) for name in ("split", "rsplit")),
        *(("replace", args) for args in (("a", "XY"), ("", "-"), ("", "-", 2), ("b", ""), ("a", "Z", 1))),
        ("splitlines", (True,)),
        ("strip", ("",)),
    ]
    for _ in range(150):
        text = mixed(rng, letters)
        marked = {mark(plain(c)) for c in text if is_marked(c)}
        for name, args in calls:
            got = METHODS[name](text, *args)
            flat = plain(got) if isinstance(got, str) else got
            if isinstance(got, (list, tuple)):
                flat = type(got)(plain(x) for x in got)
            assert flat == getattr(plain(text), name)(*args), (text, name, args)
            if name in ("split", "strip", "partition", "splitlines", "rsplit", "replace"):
                pieces = [got] if isinstance(got, str) else got
                assert {c for p in pieces for c in p if is_marked(c)} <= marked
    assert METHODS["replace"]("a" + mark("ab"), "a", "<>") == "<><>" + mark("b")
    assert METHODS["split"](mark("a") + "-b", "-") == [mark("a"), "b"]
    assert METHODS["upper"](mark("ß") + "a") == mark("SS") + "A"


def test_json_escapes_marked_text() -> None:
    rng = random.Random(6)
    for _ in range(100):
        value = {
            mixed(rng, 'a"\\'): [mixed(rng, 'ab"\\\n\x01\x7fé🙂\u2028\uf8ff\U000e0041'), 1, None, {"k": True}]
        }
        flat = {plain(k): [plain(v[0]), *v[1:]] for k, v in value.items()}
        for options in ({}, {"indent": 2}, {"sort_keys": True, "separators": (",", ":")}):
            for ascii_only in (False, True):
                got = to_json(value, ensure_ascii=ascii_only, **options)
                assert plain(got) == json.dumps(flat, ensure_ascii=ascii_only, **options)
    assert list(runs(to_json(mark_data("a"), ensure_ascii=True))) == [
        (0, 1, False),
        (1, 2, True),
        (2, 3, False),
    ]
