"""Tokenizers that transformers saved, converted: ids, BOS, ends and template are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ringlm import Tokenizer
from ringlm.convert.tokenizer import tokenizer_metadata
from tokenizer_data import NASTY, SENTENCES, SPACE, random_texts, train_byte_level

NEEDS = "conformance with transformers needs: pip install 'ringlm[conformance]'"
transformers = pytest.importorskip("transformers", reason=NEEDS)
pytestmark = pytest.mark.conformance

from test_conformance_tokenizer import BOS, END, EOS, PRES, SPECIAL_TEXTS, byte_level  # noqa: E402

TEXTS = [*NASTY, *SENTENCES, *random_texts(200, seed=6)]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def saved(tokenizer: Any, folder: Path, **generation: Any) -> tuple[Any, Tokenizer, dict[str, Any]]:
    """The tokenizer as a checkpoint has it, read again by transformers; ringlm's; the metadata."""
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text(json.dumps(generation))
    metadata = tokenizer_metadata(folder, len(tokenizer) + 3)
    assert metadata["tokenizer.chat_template"] == TEMPLATE
    return type(tokenizer).from_pretrained(folder), Tokenizer(metadata), metadata


@pytest.mark.parametrize("pre", PRES)
def test_byte_level(tmp_path: Path, pre: str) -> None:
    tokens, merges = train_byte_level(600)
    tokens = [*tokens, "Ġxyzzy", BOS, EOS, END]
    n = len(tokens)
    theirs, ours, _ = saved(byte_level(pre, tokens, merges), tmp_path, eos_token_id=[n - 2, n - 1])
    for text in [*TEXTS, "say xyzzy now"]:
        plain = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.encode(text, add_special=False) == plain, repr(text)
    for text in SPECIAL_TEXTS:
        assert ours.encode(text, parse_special=True) == theirs.encode(text), repr(text)
    assert ours.eos_id == theirs.eos_token_id == n - 2
    assert ours.eog_ids >= {n - 2, n - 1}
    assert ours.encode("a") == theirs.encode("a")  # with BOS, or without


def trained_sentencepiece(prefix: bool, control: list[str]) -> tuple[dict[str, int], list[Any]]:
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
        add_dummy_prefix=prefix,
        control_symbols=control,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=0.98,
        minloglevel=2,
        num_threads=1,
    )
    sp = spm.SentencePieceProcessor(model_proto=model.getvalue())
    n = sp.get_piece_size()
    vocab = {sp.id_to_piece(i): i for i in range(n)}
    return vocab, generate_merges(vocab, {sp.id_to_piece(i): sp.get_score(i) for i in range(n)})


@pytest.mark.parametrize("prefix", [True, False])
def test_llama_2(tmp_path: Path, prefix: bool) -> None:
    vocab, merges = trained_sentencepiece(prefix, [])
    theirs = transformers.LlamaTokenizer(vocab=vocab, merges=merges, add_prefix_space=prefix)
    theirs, ours, metadata = saved(theirs, tmp_path)
    assert metadata["tokenizer.ggml.add_space_prefix"] is prefix
    for text in TEXTS:
        # transformers puts no second space before a text that begins with one; SentencePiece does.
        if not (prefix and text.startswith((" ", SPACE))):
            plain = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
            assert ours.encode(text, add_special=False) == plain, repr(text)
    assert (ours.bos_id, ours.eos_id, ours.unk_id) == (vocab["<s>"], vocab["</s>"], vocab["<unk>"])
    assert ours.encode("a b") == theirs.encode("a b")


def test_gemma(tmp_path: Path) -> None:
    extra = ["<pad>", "<eos>", "<bos>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    vocab, merges = trained_sentencepiece(False, extra)
    theirs = transformers.GemmaTokenizer(
        vocab=vocab, merges=merges, extra_special_tokens=["<start_of_turn>", "<end_of_turn>"]
    )
    end = vocab["<end_of_turn>"]
    theirs, ours, metadata = saved(theirs, tmp_path, eos_token_id=[vocab["<eos>"], end])
    assert metadata["tokenizer.ggml.add_space_prefix"] is False
    for text in TEXTS:
        plain = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.encode(text, add_special=False) == plain, repr(text)
    assert (ours.bos_id, ours.eos_id, ours.eot_id) == (vocab["<bos>"], vocab["<eos>"], end)
    turn = "<start_of_turn>user\nHello<end_of_turn>\n"
    assert ours.encode(turn, parse_special=True) == theirs.encode(turn)
