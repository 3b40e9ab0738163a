"""What holds for every tokenizer: special ids, flags, errors, odd text; streaming; real models."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from ringlm.errors import FileFormatError, InvalidArgument, UnsupportedModelError
from ringlm.tokenizer import Tokenizer
from tokenizer_data import (
    BYTE,
    CONTROL,
    NASTY,
    NORMAL,
    SENTENCES,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    byte_spelling,
    keyed,
    write_vocab,
)

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
SPECIAL_TYPES = [UNKNOWN, CONTROL, CONTROL, CONTROL]


def byte_level(**more: Any) -> dict[str, Any]:
    """Single bytes, one word, specials."""
    tokens = [*SPECIAL, *byte_spelling().values(), "Ġhi"]
    types = SPECIAL_TYPES + [NORMAL] * 257
    return {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, "merges": [], **more}


def sentencepiece(**more: Any) -> dict[str, Any]:
    tokens = [
        *SPECIAL,
        *(f"<0x{b:02X}>" for b in range(256)),
        SPACE,
        "h",
        "i",
        "é",
        SPACE + "h",
        SPACE + "hi",
    ]
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [-float(i) for i in range(len(tokens))],
        "token_type": SPECIAL_TYPES + [BYTE] * 256 + [NORMAL] * 6,
        **more,
    }


def unigram(**more: Any) -> dict[str, Any]:
    return sentencepiece(**{"model": "t5", **more})


def raw_bpe(**more: Any) -> dict[str, Any]:
    return sentencepiece(**{"model": "gemma4", "merges": [f"{SPACE} h", f"{SPACE}h i"], **more})


ALL = pytest.mark.parametrize("make", [byte_level, sentencepiece, unigram, raw_bpe])
IDS = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "padding_token_id": 3}


@ALL
def test_vocabulary_from_a_file_without_tensors(make: Any, tmp_path: Path) -> None:
    data = make(**IDS, eot_token_id=3, eom_token_id=0)
    path = write_vocab(tmp_path / "vocab.gguf", data)
    for tokenizer in (Tokenizer(path), Tokenizer(str(path))):
        assert tokenizer.n_vocab == len(data["tokens"])
        assert (tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2, 3)
        assert (tokenizer.eot_id, tokenizer.eom_id) == (3, 0)
        assert tokenizer.eog_ids == {0, 2, 3}
        for i, text in enumerate(data["tokens"]):
            assert tokenizer.token_text(i) == text
            assert tokenizer.id_of(text) == i
            assert tokenizer.token_type(i) == data["token_type"][i]
            assert tokenizer.is_control(i) == (i < 4)
        assert tokenizer.id_of("no such token") is None


@ALL
def test_absent_ids_are_none(make: Any) -> None:
    tokenizer = Tokenizer(keyed(make()))
    named = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eot_id, tokenizer.eom_id, tokenizer.pad_id)
    assert named == (None,) * 5
    assert not tokenizer.add_bos and not tokenizer.add_eos
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"


@pytest.mark.parametrize(
    ("make", "said", "expected"),
    [
        (sentencepiece, {}, (True, False)),
        (unigram, {}, (False, True)),
        (raw_bpe, {}, (False, False)),
        (raw_bpe, {"add_bos_token": True}, (True, False)),
        (byte_level, {}, (False, False)),
        (lambda **k: byte_level(**{**k, "pre": "llama-bpe"}), {}, (True, False)),
        (sentencepiece, {"add_bos_token": False, "add_eos_token": True}, (False, True)),
        (byte_level, {"add_bos_token": True, "add_eos_token": True}, (True, True)),
    ],
)
def test_bos_and_eos(make: Any, said: dict[str, bool], expected: tuple[bool, bool]) -> None:
    tokenizer = Tokenizer(keyed(make(**IDS, **said)))
    assert (tokenizer.add_bos, tokenizer.add_eos) == expected
    for text in ("", "hi"):
        plain = tokenizer.encode(text, add_special=False)
        assert tokenizer.encode(text) == [1] * expected[0] + plain + [2] * expected[1]


@ALL
@pytest.mark.parametrize("name", ["bos", "eos"])
def test_bos_demanded_but_missing(make: Any, name: str) -> None:
    with pytest.raises(FileFormatError, match=f"{name}_token_id is missing"):
        Tokenizer(keyed(make(**{f"add_{name}_token": True})))


@ALL
@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom", "unknown", "padding"])
@pytest.mark.parametrize("value", [-1, 10**6, 2**32 - 1, "1", 1.0, True])
def test_bad_special_ids(make: Any, name: str, value: Any) -> None:
    with pytest.raises(FileFormatError, match=f"{name}_token_id"):
        Tokenizer(keyed(make(**{f"{name}_token_id": value})))


@ALL
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokens", None),
        ("tokens", []),
        ("tokens", "text"),
        ("tokens", [1, 2]),
        ("token_type", [1]),
        ("token_type", ["1"]),
        ("token_type", 7),
        ("add_bos_token", 1),
        ("add_eos_token", "yes"),
        ("model", 3),
        ("model", None),
        ("pre", 1),
    ],
)
def test_bad_metadata_is_named(make: Any, key: str, value: Any) -> None:
    with pytest.raises(FileFormatError, match=key):
        Tokenizer(keyed({**make(), key: value}))


@ALL
@pytest.mark.parametrize("kind", [0, 7, -1])
def test_bad_token_types(make: Any, kind: int) -> None:
    data = make()
    data["token_type"] = [kind, *data["token_type"][1:]]
    with pytest.raises(FileFormatError, match="token_type"):
        Tokenizer(keyed(data))


@pytest.mark.parametrize("model", ["bert", "rwkv", "no_vocab", "plamo2", ""])
def test_other_kinds_of_tokenizers(model: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"gpt2.*llama.*t5.*gemma4"):
        Tokenizer(keyed(byte_level(model=model)))


@ALL
def test_ids_outside_the_vocabulary(make: Any) -> None:
    tokenizer = Tokenizer(keyed(make()))
    for bad in (-1, tokenizer.n_vocab, 10**20):
        for call in (tokenizer.token_bytes, tokenizer.token_text, tokenizer.token_type, tokenizer.is_control):
            with pytest.raises(InvalidArgument, match="not in the vocabulary"):
                call(bad)
        with pytest.raises(InvalidArgument):
            tokenizer.decode([5, bad])
        with pytest.raises(InvalidArgument):
            tokenizer.stream().push(bad)


@pytest.mark.parametrize(
    ("text", "kind", "ends"),
    [
        ("<|im_end|>", CONTROL, True),
        ("<|eot_id|>", USER_DEFINED, True),
        ("<|end|>", CONTROL, True),
        ("<end_of_turn>", CONTROL, True),
        ("<turn|>", CONTROL, True),
        ("<|endoftext|>", CONTROL, True),
        ("<|eom_id|>", CONTROL, True),
        ("<|im_end|>", NORMAL, False),
        ("<|im_start|>", CONTROL, False),
        ("</s>", CONTROL, True),
        ("</s>", USER_DEFINED, False),  # HTML, strike-through
    ],
)
@ALL
def test_well_known_end_markers(make: Any, text: str, kind: int, ends: bool) -> None:
    data = make()
    data["tokens"] = ["<x>" if t == "</s>" else t for t in data["tokens"]] + [text]
    data["token_type"] = [*data["token_type"], kind]
    if "scores" in data:
        data["scores"] = [*data["scores"], 0.0]
    tokenizer = Tokenizer(keyed(data))
    new = tokenizer.n_vocab - 1
    assert tokenizer.eog_ids == ({new} if ends else set())
    assert tokenizer.eom_id == (new if text == "<|eom_id|>" else None)
    assert tokenizer.eot_id == (new if ends and text not in ("<|eom_id|>", "</s>") else None)


def test_harmony_goes_on_after_an_end_of_message() -> None:
    data = byte_level()
    data["tokens"] = [*data["tokens"], "<|end|>", "<|return|>", "<|call|>"]
    data["token_type"] = [*data["token_type"], CONTROL, CONTROL, CONTROL]
    tokenizer = Tokenizer(keyed(data))
    assert tokenizer.id_of("<|end|>") not in tokenizer.eog_ids
    assert {tokenizer.id_of("<|return|>"), tokenizer.id_of("<|call|>")} <= tokenizer.eog_ids


@ALL
def test_lone_surrogates_become_replacement_characters(make: Any) -> None:
    tokenizer = Tokenizer(keyed(make()))
    for text, expected in [
        ("a\ud800b", "a\ufffdb"),
        ("\udc80", "\ufffd"),
        ("\ud83d\ude00", "😀"),
        ("\ud800\ud83d\ude00\udfff\ud800", "\ufffd😀\ufffd\ufffd"),
    ]:
        assert tokenizer.decode(tokenizer.encode(text)) == expected
        assert tokenizer.decode(tokenizer.encode(text, parse_special=True)) == expected


def test_tokens_that_are_not_utf8() -> None:
    """The reader hands out such bytes as surrogates; they are the token's bytes again."""
    for make in (byte_level, sentencepiece, unigram, raw_bpe):
        data = {**make(), "merges": []}
        data["tokens"] = [*data["tokens"][:-1], "\udcff\udc80"]
        tokenizer = Tokenizer(keyed(data))
        assert tokenizer.token_bytes(tokenizer.n_vocab - 1) == b"\xff\x80"
        assert tokenizer.decode(tokenizer.encode("é hi")) == "é hi"


# -- streaming --


def incomplete_tail(raw: bytes) -> int:
    """Length of the tail that more bytes could still make a character."""
    for n in (3, 2, 1):
        if len(raw) >= n and raw[-n:] in PREFIXES:
            return n
    return 0


# All beginnings of encoded characters; a step of 64 code points visits every leading part.
PREFIXES = {
    encoded[:n]
    for c in range(0x80, 0x110000, 64)
    if not 0xD800 <= c < 0xE000
    for encoded in [chr(c).encode()]
    for n in range(1, len(encoded))
}


def check_stream(tokenizer: Tokenizer, ids: list[int], skip_special: bool, continuation: bool) -> None:
    stream = tokenizer.stream(skip_special, continuation=continuation)
    raw, text = b"", ""
    stripped = continuation or not tokenizer.add_space_prefix
    for i in ids:
        control = tokenizer.is_control(i)
        piece = tokenizer.token_bytes(i) if not (control and skip_special) else b""
        if not control and not stripped:
            piece, stripped = piece.removeprefix(b" "), True
        raw += piece
        text += stream.push(i)
        ready = raw[: len(raw) - incomplete_tail(raw)]
        assert text == ready.decode("utf-8", "replace")
    text += stream.flush()
    assert text == raw.decode("utf-8", "replace")
    assert text == tokenizer.decode(ids, skip_special, continuation=continuation)
    assert stream.flush() == ""


@ALL
@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("continuation", [True, False])
def test_stream_of_random_bytes(make: Any, skip_special: bool, continuation: bool) -> None:
    tokenizer = Tokenizer(keyed(make()))
    rng = random.Random(9)
    by_byte = {raw[0]: i for i in range(4, 260) if len(raw := tokenizer.token_bytes(i)) == 1}
    assert len(by_byte) == 256
    lead = [0xC2, 0xDF, 0xE0, 0xE1, 0xED, 0xEF, 0xF0, 0xF1, 0xF4, 0xF5, 0xC0, 0xFF]
    after = [0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0x41, 0x20]
    for _ in range(250):
        ids: list[int] = []
        for _ in range(rng.randint(0, 12)):
            choice = rng.randrange(4)
            if choice == 0:
                ids.append(rng.randrange(tokenizer.n_vocab))
            elif choice == 1:
                ids += [by_byte[b] for b in "é日😀\U0010ffff"[rng.randrange(4)].encode()]
            else:
                ids += [
                    by_byte[rng.choice(lead)],
                    *(by_byte[rng.choice(after)] for _ in range(rng.randrange(4))),
                ]
        check_stream(tokenizer, ids, skip_special, continuation)


@ALL
def test_stream_of_text(make: Any) -> None:
    tokenizer = Tokenizer(keyed(make(**IDS)))
    for text in [*NASTY, *SENTENCES]:
        check_stream(tokenizer, tokenizer.encode(text), True, False)
        stream = tokenizer.stream()
        pieces = [stream.push(i) for i in tokenizer.encode(text)]
        spelled = text if make is byte_level else text.replace(SPACE, " ")  # a typed U+2581 is a space
        assert "".join(pieces) == spelled and stream.flush() == ""


@ALL
def test_half_a_character_is_flushed_and_the_stream_starts_anew(make: Any) -> None:
    tokenizer = Tokenizer(keyed(make()))
    ids = tokenizer.encode("😀", add_special=False)
    stream = tokenizer.stream()
    assert "".join(stream.push(i) for i in ids[:-1]) == ""
    assert stream.flush() == "\ufffd"
    assert "".join(stream.push(i) for i in ids) == "😀"
    assert stream.push(tokenizer.encode(" hi", add_special=False)[-1]) in (" hi", "i")
