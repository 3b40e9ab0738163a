"""Token ids and decoded text against the tokenizers of Hugging Face transformers.

The pipelines (normalizer, splits, prefix rules, decoders) are those that transformers itself builds for
GPT-2, CodeGen (Phi-2), GPT-NeoX (OLMo), Cohere, Qwen2, Qwen3.5, Llama 3 (its tiktoken converter), Llama 2 and
Gemma; SmolLM's is the published one. Vocabularies are trained here.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from ringlm.pretokenizers import PRE_TOKENIZERS, name_of
from ringlm.tokenizer import Tokenizer
from tokenizer_data import (
    BYTE,
    CONTROL,
    NASTY,
    NORMAL,
    SENTENCES,
    SPACE,
    UNKNOWN,
    keyed,
    random_texts,
    train_byte_level,
    write_vocab,
)

NEEDS = "conformance with transformers needs: pip install 'ringlm[conformance]'"
transformers = pytest.importorskip("transformers", reason=NEEDS)
pytestmark = pytest.mark.conformance

CLASSES = {
    "gpt-2": "GPT2Tokenizer",
    "phi-2": "CodeGenTokenizer",
    "olmo": "GPTNeoXTokenizer",
    "command-r": "CohereTokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen35": "Qwen3_5Tokenizer",
}
PRES = [*CLASSES, "smollm", "llama-bpe"]
BOS, EOS, END = "<|begin|>", "<|endoftext|>", "<|im_end|>"
SPECIAL_TEXTS = [
    f"{BOS}a{END}",
    f"a{END}{END} b {EOS}\n{END} c",
    f"{END}  {END}\n\n{END}é{BOS}",
    "<|im_end|<|im_end|>>",
    "<|im_end|",
]
TEXTS = [*NASTY, *SENTENCES, *random_texts(400, seed=5)]


@pytest.fixture(scope="module")
def trained() -> tuple[list[str], list[str]]:
    tokens, merges = train_byte_level(800)
    return [*tokens, BOS, EOS, END], merges


def byte_level(pre: str, tokens: list[str], merges: list[str]) -> Any:
    """The tokenizer of the model family, as transformers builds it."""
    vocab = {t: i for i, t in enumerate(tokens)}
    pairs = [tuple(m.split(" ")) for m in merges]
    special = {"bos_token": BOS, "eos_token": EOS, "unk_token": None, "extra_special_tokens": [END]}
    if pre in CLASSES:
        own = {**special, "pad_token": None, "unk_token": EOS}
        if pre == "command-r":
            own |= dict.fromkeys(["cls_token", "sep_token", "mask_token"])
        return getattr(transformers, CLASSES[pre])(vocab=vocab, merges=pairs, **own)
    if pre == "llama-bpe":
        from transformers.convert_slow_tokenizer import TikTokenConverter

        class Trained(TikTokenConverter):  # type: ignore[misc]
            def extract_vocab_merges_from_model(self, tiktoken_url: str) -> Any:
                return vocab, pairs

        backend = Trained().converted()
    else:
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers

        backend = Backend(models.BPE(vocab, pairs))
        digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
        backend.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@pytest.fixture(scope="module", params=PRES)
def case(
    request: pytest.FixtureRequest,
    trained: tuple[list[str], list[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Any, Tokenizer]:
    tokens, merges = trained
    # A word that no merge gives: only Llama 3's rule finds it.
    tokens = [*tokens[:-3], "Ġxyzzy", *tokens[-3:]]
    n = len(tokens)
    metadata = {
        "model": "gpt2",
        "pre": request.param,
        "tokens": tokens,
        "token_type": [NORMAL] * (n - 3) + [CONTROL] * 3,
        "merges": merges,
        "bos_token_id": n - 3,
        "eos_token_id": n - 2,
        "add_bos_token": False,
    }
    path = write_vocab(tmp_path_factory.mktemp("vocab") / "bpe.gguf", metadata)
    theirs = byte_level(request.param, tokens, merges)
    assert len(theirs) == n
    return theirs, Tokenizer(path)


def test_byte_level_ids(case: tuple[Any, Tokenizer]) -> None:
    theirs, ours = case
    for text in [*TEXTS, "say xyzzy now"]:
        expected = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.encode(text) == expected, repr(text)


def test_the_texts_tell_the_pipelines_apart(trained: tuple[list[str], list[str]]) -> None:
    pipelines = [byte_level(pre, *trained) for pre in PRES if pre != "phi-2"]  # GPT-2's
    ids = [[p.encode(text, add_special_tokens=False) for text in TEXTS] for p in pipelines]
    for a, b in itertools.combinations(ids, 2):
        assert a != b


def test_byte_level_special_tokens(case: tuple[Any, Tokenizer]) -> None:
    theirs, ours = case
    for text in SPECIAL_TEXTS:
        parsed = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, parse_special=True) == parsed, repr(text)
        typed = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.encode(text) == typed, repr(text)
    assert theirs.convert_tokens_to_ids(END) in theirs.encode(SPECIAL_TEXTS[0])


def test_byte_level_decode(case: tuple[Any, Tokenizer]) -> None:
    theirs, ours = case
    for text in [*TEXTS, *SPECIAL_TEXTS]:
        ids = theirs.encode(text, add_special_tokens=False)
        for skip in (False, True):
            assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no-prefix"])
def llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    """A vocabulary trained by SentencePiece, in Llama 2's tokenizer and in a GGUF file."""
    import io

    spm = pytest.importorskip("sentencepiece")
    from transformers.convert_slow_tokenizer import generate_merges

    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([line for s in SENTENCES for line in s.splitlines()] * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=520,
        byte_fallback=True,
        add_dummy_prefix=request.param,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=0.98,
        minloglevel=2,
        num_threads=1,
    )
    sp = spm.SentencePieceProcessor(model_proto=model.getvalue())
    n = sp.get_piece_size()
    pieces, scores = [sp.id_to_piece(i) for i in range(n)], [sp.get_score(i) for i in range(n)]
    types = [
        UNKNOWN if sp.is_unknown(i) else CONTROL if sp.is_control(i) else BYTE if sp.is_byte(i) else NORMAL
        for i in range(n)
    ]
    vocab = {p: i for i, p in enumerate(pieces)}
    theirs = transformers.LlamaTokenizer(
        vocab=vocab,
        merges=generate_merges(vocab, dict(zip(pieces, scores, strict=True))),
        add_prefix_space=request.param,
    )
    metadata = {
        "model": "llama",
        "tokens": pieces,
        "scores": scores,
        "token_type": types,
        "bos_token_id": sp.bos_id(),
        "eos_token_id": sp.eos_id(),
        "unknown_token_id": sp.unk_id(),
        "add_space_prefix": request.param,
    }
    return theirs, Tokenizer(write_vocab(tmp_path_factory.mktemp("vocab") / "spm.gguf", metadata))


def test_sentencepiece_ids(llama: tuple[Any, Tokenizer]) -> None:
    theirs, ours = llama
    for text in TEXTS:
        # transformers puts no second space before a text that begins with one. SentencePiece does, and the
        # models were trained with it; test_tokenizer_sentencepiece.py compares these texts with it.
        if ours.add_space_prefix and text.startswith((" ", SPACE)):
            continue
        expected = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.encode(text, add_special=False) == expected, repr(text)


def test_sentencepiece_bos(llama: tuple[Any, Tokenizer]) -> None:
    theirs, ours = llama
    for text in SENTENCES:
        assert ours.encode(text) == [ours.bos_id, *theirs.encode(text, add_special_tokens=False)]


def test_sentencepiece_decode(llama: tuple[Any, Tokenizer]) -> None:
    theirs, ours = llama
    for text in [*SENTENCES, "x\U0001f9ff y", "two  spaces ", "\n\n a"]:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("model", ["llama", "gemma4"])
def test_gemma(model: str) -> None:
    """Gemma's vocabulary as scores (Gemma to Gemma 3) and as merges (Gemma 4): no prefix, no words."""
    import io

    spm = pytest.importorskip("sentencepiece")
    from transformers.convert_slow_tokenizer import generate_merges

    written = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([line for s in SENTENCES for line in s.splitlines()] * 3),
        model_writer=written,
        model_type="bpe",
        vocab_size=620,
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        character_coverage=0.98,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        minloglevel=2,
        num_threads=1,
    )
    sp = spm.SentencePieceProcessor(model_proto=written.getvalue())
    n = sp.get_piece_size()
    pieces, scores = [sp.id_to_piece(i) for i in range(n)], [sp.get_score(i) for i in range(n)]
    types = [CONTROL] * 3 + [UNKNOWN] + [BYTE if sp.is_byte(i) else NORMAL for i in range(4, n)]
    vocab = {p: i for i, p in enumerate(pieces)}
    merges = generate_merges(vocab, dict(zip(pieces, scores, strict=True)))
    theirs = transformers.GemmaTokenizer(vocab=vocab, merges=merges)
    ours = Tokenizer(
        keyed(
            {
                "model": model,
                "tokens": pieces,
                "token_type": types,
                "scores": scores,
                "merges": [" ".join(pair) for pair in merges],
                "bos_token_id": 2,
                "eos_token_id": 1,
                "unknown_token_id": 3,
                "add_bos_token": True,
                "add_space_prefix": False,
            }
        )
    )
    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.encode(text) == [2, *expected], repr(text)
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
    for text in ("a<eos>b", "<bos><bos> x", "x <eos>\n"):
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special=False, parse_special=True) == expected


def test_names_of_files_that_transformers_writes(
    trained: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    """Of the files that `save_pretrained` makes: the rules of the name are those of the file."""
    for pre in PRES:
        byte_level(pre, *trained).save_pretrained(tmp_path / pre)
        file = json.loads((tmp_path / pre / "tokenizer.json").read_text(encoding="utf-8"))
        found, wanted = PRE_TOKENIZERS[name_of(file)], PRE_TOKENIZERS[pre]
        assert (found.steps, found.nfc) == (wanted.steps, wanted.nfc), pre
