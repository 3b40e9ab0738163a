"""SentencePiece Unigram against the sentencepiece package and against all ways to cut a text."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from ringlm.errors import FileFormatError, InvalidArgument
from ringlm.tokenizer import Tokenizer
from tokenizer_data import (
    BYTE,
    CONTROL,
    NASTY,
    NORMAL,
    SENTENCES,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    keyed,
    random_texts,
    write_vocab,
)

spm = pytest.importorskip("sentencepiece")

USER = ["<tool>", "<tool>s", "ab", "a  b", "語"]
TEXTS = [*NASTY, *SENTENCES, *random_texts(400, seed=3)]
CASES = [
    # rules, space prefix, single spaces, bytes for unknown characters, user-defined tokens
    ("nmt_nfkc", True, True, False, []),  # T5
    ("nmt_nfkc", True, True, True, USER),
    ("nmt_nfkc", False, False, True, []),
    ("nfkc_cf", True, False, False, USER),
    ("identity", False, True, False, USER),
    ("identity", True, False, True, []),
]


def train(rules: str, prefix: bool, single: bool, byte_fallback: bool, user: list[str]) -> tuple[Any, bytes]:
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([line for s in SENTENCES for line in s.splitlines()] * 3),
        model_writer=model,
        model_type="unigram",
        vocab_size=700 if byte_fallback else 400,
        hard_vocab_limit=False,
        byte_fallback=byte_fallback,
        user_defined_symbols=user,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=single,
        normalization_rule_name=rules,
        character_coverage=0.98,
        minloglevel=2,
        num_threads=1,
    )
    return spm.SentencePieceProcessor(model_proto=model.getvalue()), charsmap(model.getvalue())


def charsmap(model: bytes) -> bytes:
    """The compiled rules: field 2 of the NormalizerSpec, which is field 3 of a ModelProto."""
    [spec] = [value for field, value in fields(model) if field == 3]
    return b"".join(value for field, value in fields(spec) if field == 2)


def fields(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Fields of a protocol buffer that are messages or bytes."""
    pos = 0

    def varint() -> int:
        nonlocal pos
        value = 0
        for shift in itertools.count(0, 7):
            byte = raw[pos]
            pos += 1
            value |= (byte & 127) << shift
            if byte < 128:
                break
        return value

    while pos < len(raw):
        tag = varint()
        kind = tag & 7
        if kind == 0:
            varint()
            continue
        size = {1: 8, 5: 4}.get(kind) or varint()
        if kind == 2:
            yield tag >> 3, raw[pos : pos + size]
        pos += size


def metadata(sp: Any, rules: bytes, prefix: bool, single: bool, user: list[str]) -> dict[str, Any]:
    def kind(i: int) -> int:
        if sp.is_unknown(i):
            return UNKNOWN
        if sp.is_control(i):
            return CONTROL
        if sp.is_byte(i):
            return BYTE
        return USER_DEFINED if sp.id_to_piece(i) in user else NORMAL

    n = sp.get_piece_size()
    more = {"precompiled_charsmap": list(rules)} if rules else {}
    return {
        "model": "t5",
        "pre": "default",
        "tokens": [sp.id_to_piece(i) for i in range(n)],
        "scores": [sp.get_score(i) for i in range(n)],
        "token_type": [kind(i) for i in range(n)],
        "unknown_token_id": sp.unk_id(),
        "bos_token_id": sp.bos_id(),
        "eos_token_id": sp.eos_id(),
        "add_space_prefix": prefix,
        "remove_extra_whitespaces": single,
        **more,
    }


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case[:4])))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    rules, prefix, single, byte_fallback, user = request.param
    sp, compiled = train(rules, prefix, single, byte_fallback, user)
    assert bool(compiled) == (rules != "identity")
    path = write_vocab(
        tmp_path_factory.mktemp("unigram") / "t5.gguf", metadata(sp, compiled, prefix, single, user)
    )
    return sp, Tokenizer(path)


def test_ids_equal_sentencepiece(case: tuple[Any, Tokenizer]) -> None:
    sp, tokenizer = case
    for text in TEXTS:
        assert tokenizer.encode(text, add_special=False) == sp.encode(text), repr(text)


def test_text_of_ids_equals_sentencepiece(case: tuple[Any, Tokenizer]) -> None:
    sp, tokenizer = case
    for text in TEXTS:
        ids = sp.encode(text)
        if sp.unk_id() not in ids:
            assert tokenizer.decode(ids) == sp.decode(ids), repr(text)


def test_eos_and_no_bos_where_the_file_does_not_say(case: tuple[Any, Tokenizer]) -> None:
    sp, tokenizer = case
    assert (tokenizer.add_bos, tokenizer.add_eos, tokenizer.model) == (False, True, "t5")
    assert tokenizer.encode("one") == [*sp.encode("one"), sp.eos_id()]


def test_typed_control_tokens_stay_text(case: tuple[Any, Tokenizer]) -> None:
    sp, tokenizer = case
    for name in ("<s>", "</s>", "<unk>"):
        special = tokenizer.id_of(name)
        assert special is not None and tokenizer.is_control(special)
        ids = tokenizer.encode(f"a {name} b", add_special=False)
        assert ids == sp.encode(f"a {name} b")
        parsed = tokenizer.encode(f"a{name} b", add_special=False, parse_special=True)
        assert parsed == [*sp.encode("a"), special, *sp.encode(" b")]


def random_vocab(seed: int) -> tuple[list[str], list[float], list[int]]:
    """Few letters, scores in halves (sums of floats are exact), some pieces unused, no single "c"."""
    rng = random.Random(seed)
    pieces = {"".join(rng.choices(f"abc{SPACE}", k=rng.randint(2, 4))) for _ in range(40)}
    tokens = ["<unk>", "a", "b", SPACE, *sorted(pieces)]
    scores = [-rng.randint(1, 40) / 2 for _ in tokens]
    types = [UNKNOWN] + [NORMAL] * 3 + [rng.choice([NORMAL] * 5 + [UNUSED]) for _ in pieces]
    return tokens, scores, types


def cuts(text: str, scores: dict[str, float], unknown: float) -> Iterator[tuple[float, list[str]]]:
    """Every way to cut a text into pieces and unknown characters, with its sum of scores."""
    if not text:
        yield 0.0, []
    for n in range(1, len(text) + 1):
        head = text[:n]
        score = scores.get(head, unknown if n == 1 else None)
        if score is not None:
            for rest, pieces in cuts(text[n:], scores, unknown):
                yield score + rest, [head, *pieces]


@pytest.mark.parametrize("seed", range(6))
def test_no_cut_is_better(seed: int) -> None:
    tokens, scores, types = random_vocab(seed)
    data = {"model": "t5", "tokens": tokens, "scores": scores, "token_type": types}
    tokenizer = Tokenizer(keyed(data))
    known = {t: s for t, s, k in zip(tokens, scores, types, strict=True) if k == NORMAL}
    unknown = min(known.values()) - 10
    rng = random.Random(seed + 100)
    for _ in range(40):
        text = "".join(rng.choices("abc ", k=rng.randint(1, 9)))
        spelled = text.replace(" ", SPACE)
        best = max(total for total, _ in cuts(spelled, known, unknown))
        found = [tokenizer.token_text(i) for i in tokenizer.encode(text)]
        totals = [
            total
            for total, pieces in cuts(spelled, known, unknown)
            if one_unknown([p if p in known else "<unk>" for p in pieces]) == found
        ]
        assert totals and max(totals) == best, repr(text)


def one_unknown(pieces: list[str]) -> list[str]:
    return [p for k, p in enumerate(pieces) if p != "<unk>" or k == 0 or pieces[k - 1] != p]


def test_without_bytes_and_unknown_token_a_strange_character_is_an_error() -> None:
    data = {"model": "t5", "tokens": ["a", SPACE], "scores": [-1.0, -2.0], "token_type": [NORMAL] * 2}
    tokenizer = Tokenizer(keyed(data))
    assert tokenizer.encode("a a") == [0, 1, 0]
    with pytest.raises(InvalidArgument, match="'é'"):
        tokenizer.encode("aé")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scores", None),
        ("scores", [0.0]),
        ("precompiled_charsmap", "text"),
        ("precompiled_charsmap", [1.5, 2.0]),
        ("precompiled_charsmap", [300]),
        ("precompiled_charsmap", [1, 0, 0]),
        ("precompiled_charsmap", [5, 0, 0, 0, 1, 2, 3, 4, 5]),  # no whole units
        ("precompiled_charsmap", [8, 0, 0, 0, 1, 2, 3, 4]),  # longer than the data
        ("precompiled_charsmap", [0, 0, 0, 0, 65, 0]),  # no root
        ("add_space_prefix", 1),
        ("remove_extra_whitespaces", "yes"),
    ],
)
def test_bad_metadata_is_named(key: str, value: Any) -> None:
    data = {"model": "t5", "tokens": ["a", "b"], "scores": [-1.0, -2.0], "token_type": [1, 1], key: value}
    with pytest.raises(FileFormatError, match=key):
        Tokenizer(keyed(data))


def test_altered_rules_never_crash() -> None:
    """Places out of bounds are an error that names the key; others give some text."""
    _, compiled = train("nmt_nfkc", True, True, False, [])
    data = {"model": "t5", "tokens": ["<unk>", "a"], "scores": [0.0, -1.0], "token_type": [UNKNOWN, NORMAL]}
    rng = random.Random(5)
    refused = 0
    for _ in range(60):
        altered = bytearray(compiled)
        for _ in range(3000):
            altered[rng.randrange(4, len(altered))] = rng.randrange(256)
        tokenizer = Tokenizer(keyed({**data, "precompiled_charsmap": list(altered)}))
        for text in ("ﬁne \uff21", "e\u0301", "日本語 ㍿", "plain words"):
            try:
                tokenizer.encode(text)
            except FileFormatError as error:
                assert "precompiled_charsmap" in str(error)
                refused += 1
    assert refused  # or the bounds are never met here


def test_rules_that_would_fill_the_memory_are_refused() -> None:
    _, compiled = train("nmt_nfkc", True, True, False, [])
    size = int.from_bytes(compiled[:4], "little")
    endless = compiled[: 4 + size] + compiled[4 + size :].replace(b"\0", b"x")
    data = {"model": "t5", "tokens": ["<unk>", "a"], "scores": [0.0, -1.0], "token_type": [UNKNOWN, NORMAL]}
    tokenizer = Tokenizer(keyed({**data, "precompiled_charsmap": list(endless)}))
    with pytest.raises(FileFormatError, match="precompiled_charsmap"):
        tokenizer.encode("\ufb01")
