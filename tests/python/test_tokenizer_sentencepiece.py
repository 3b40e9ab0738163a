"""SentencePiece BPE against the sentencepiece package and against the algorithm told naively."""

from __future__ import annotations

import io
import itertools
import random
import time
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
    oracle_sentencepiece,
    random_texts,
    write_vocab,
)

spm = pytest.importorskip("sentencepiece")

USER = ["<tool>", "<tool>s", "ab", "\n", "\n\n", "語"]
TEXTS = [*NASTY, *SENTENCES, *random_texts(400, seed=3)]


def train(prefix: bool, byte_fallback: bool, user: list[str], vocab_size: int = 520) -> Any:
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([line for s in SENTENCES for line in s.splitlines()] * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=byte_fallback,
        user_defined_symbols=user,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=1.0 if not byte_fallback else 0.98,
        minloglevel=2,
        num_threads=1,
    )
    return spm.SentencePieceProcessor(model_proto=model.getvalue())


def metadata(sp: Any, prefix: bool, user: list[str]) -> dict[str, Any]:
    def kind(i: int) -> int:
        if sp.is_unknown(i):
            return UNKNOWN
        if sp.is_control(i):
            return CONTROL
        if sp.is_byte(i):
            return BYTE
        return USER_DEFINED if sp.id_to_piece(i) in user else NORMAL

    n = sp.get_piece_size()
    return {
        "model": "llama",
        "tokens": [sp.id_to_piece(i) for i in range(n)],
        "scores": [sp.get_score(i) for i in range(n)],
        "token_type": [kind(i) for i in range(n)],
        "bos_token_id": sp.bos_id(),
        "eos_token_id": sp.eos_id(),
        "unknown_token_id": sp.unk_id(),
        "add_space_prefix": prefix,
    }


@pytest.fixture(scope="module", params=["prefix+bytes+user", "bytes", "prefix", "user"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    prefix, byte_fallback = "prefix" in request.param, "bytes" in request.param
    user = USER if "user" in request.param else []
    sp = train(prefix, byte_fallback, user)
    path = write_vocab(tmp_path_factory.mktemp("spm") / "spm.gguf", metadata(sp, prefix, user))
    return sp, Tokenizer(path)


def test_ids_equal_sentencepiece(case: tuple[Any, Tokenizer]) -> None:
    sp, tokenizer = case
    for text in TEXTS:
        assert tokenizer.encode(text, add_special=False) == sp.encode(text), repr(text)


def test_round_trip(case: tuple[Any, Tokenizer]) -> None:
    sp, tokenizer = case
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids[0] == sp.bos_id()
        if sp.unk_id() not in ids:
            assert tokenizer.decode(ids) == text.replace(SPACE, " ")  # a typed U+2581 is a space


def test_byte_fallback_or_unknown(case: tuple[Any, Tokenizer]) -> None:
    sp, tokenizer = case
    text = "x\U0001f9ff\U0001f9fe y"
    ids = tokenizer.encode(text, add_special=False)
    if sp.piece_to_id("<0xF0>") == sp.unk_id():
        assert ids.count(sp.unk_id()) == 1  # one for the run
        assert tokenizer.decode(ids) == "x y"
    else:
        assert tokenizer.decode(ids) == text


def test_typed_control_tokens_stay_text(case: tuple[Any, Tokenizer]) -> None:
    sp, tokenizer = case
    for name in ("<s>", "</s>", "<unk>"):
        special = tokenizer.id_of(name)
        assert special is not None and tokenizer.is_control(special)
        ids = tokenizer.encode(f"a {name} b", add_special=False)
        assert ids == sp.encode(f"a {name} b")
        if sp.unk_id() not in ids:  # an unknown character is the only way to an unknown token
            assert not any(map(tokenizer.is_control, ids))
        assert tokenizer.encode(name, add_special=False, parse_special=True) == [special]


def test_space_prefix_of_each_run(case: tuple[Any, Tokenizer]) -> None:
    sp, tokenizer = case
    ids = tokenizer.encode("one</s>two <s>", add_special=False, parse_special=True)
    assert ids == [*sp.encode("one"), sp.eos_id(), *sp.encode("two "), sp.bos_id()]
    run = tokenizer.encode("two", add_special=False)
    assert tokenizer.decode([sp.bos_id(), *run], skip_special=False) == "<s>two"
    if tokenizer.add_space_prefix:  # the space goes once, at the start, and stays in a continuation
        assert tokenizer.decode([*run, *run]) == "two two"
        assert tokenizer.decode(run, continuation=True) == " two"
    else:
        assert tokenizer.decode([*run, *run]) == "twotwo"


def random_vocab(seed: int) -> tuple[list[str], list[float], list[int]]:
    """A vocabulary that no trainer would make: ties, pieces better than their parts, unused pieces,
    pieces over spaces, a letter that is no piece itself (c)."""
    rng = random.Random(seed)
    pieces = {"".join(rng.choices(f"abc{SPACE}", k=rng.randint(2, 5))) for _ in range(60)}
    tokens = ["<unk>", "a", "b", SPACE, *sorted(pieces)]
    tokens += [f"<0x{b:02X}>" for b in range(256)]
    scores = [float(-rng.randint(0, 12)) for _ in tokens]
    types = [UNKNOWN] + [NORMAL] * 3 + [rng.choice([NORMAL] * 5 + [UNUSED]) for _ in pieces] + [BYTE] * 256
    return tokens, scores, types


@pytest.mark.parametrize("seed", range(12))
def test_odd_vocabularies_equal_the_naive_algorithm(seed: int) -> None:
    tokens, scores, types = random_vocab(seed)
    data = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "add_space_prefix": False,
    }
    tokenizer = Tokenizer(keyed(data))
    costs = {t: s for t, s, k in zip(tokens, scores, types, strict=True) if k in (NORMAL, UNUSED)}
    unused = {t for t, k in zip(tokens, types, strict=True) if k == UNUSED}
    rng = random.Random(seed + 100)
    for _ in range(150):
        text = "".join(rng.choices("abc ", k=rng.randint(1, 30)))
        expected = []
        for piece in oracle_sentencepiece(text.replace(" ", SPACE), costs, unused):
            expected += [piece] if piece in costs else [f"<0x{b:02X}>" for b in piece.encode()]
        assert [tokenizer.token_text(i) for i in tokenizer.encode(text)] == expected, repr(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_never_form_special_tokens() -> None:
    tokens = ["<unk>", "ab", "abc", "a", "b", "c", *(f"<0x{b:02X}>" for b in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, NORMAL, NORMAL, NORMAL] + [BYTE] * 256
    data = {"model": "llama", "tokens": tokens, "scores": [0.0] * len(tokens), "token_type": types}
    tokenizer = Tokenizer(keyed({**data, "add_space_prefix": False}))
    assert tokenizer.encode("abcab") == [3, 4, 5, 3, 4]
    assert tokenizer.encode("abcab", parse_special=True) == [2, 1]
    assert tokenizer.encode("<0x41>") == [6 + b for b in b"<0x41>"]


def test_a_character_that_cannot_be_expressed() -> None:
    data = {"model": "llama", "tokens": ["a", SPACE], "scores": [0.0, 0.0], "token_type": [NORMAL] * 2}
    tokenizer = Tokenizer(keyed(data))
    assert tokenizer.encode("a a") == [1, 0, 1, 0]
    with pytest.raises(InvalidArgument, match="'é'"):
        tokenizer.encode("aé")


def test_files_without_token_types() -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "<", "s", ">", "<s", SPACE]
    data = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * len(tokens),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    tokenizer = Tokenizer(keyed(data))
    ids = tokenizer.encode("<s>é", add_special=False)
    assert not any(map(tokenizer.is_control, ids))
    assert tokenizer.decode(ids) == "<s>é"


@pytest.mark.parametrize("scores", [None, [0.0], [float("nan")] * 2, "text"])
def test_bad_scores(scores: Any) -> None:
    data = {"model": "llama", "tokens": ["a", "b"], "scores": scores, "token_type": [1, 1]}
    with pytest.raises(FileFormatError, match="scores"):
        Tokenizer(keyed(data))


def test_a_large_vocabulary_opens_quickly() -> None:
    """262,144 tokens, as Gemma has, in under 1.3 s, with nothing prepared and kept by an earlier opening."""
    words = ["".join(w) for w in itertools.islice(itertools.product("etaoinsrh", repeat=6), 262_144 - 267)]
    tokens = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), SPACE, *"etaoinsrh", *words]
    data = {
        "model": "llama",
        "tokens": tokens,
        "scores": [-float(i) for i in range(len(tokens))],
        "token_type": [UNKNOWN] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 257),
    }
    start = time.process_time()
    tokenizer = Tokenizer(keyed(data))
    assert tokenizer.decode(tokenizer.encode("one thing")) == "one thing"
    assert time.process_time() - start < 1.3
    assert tokenizer.n_vocab == 262_144
