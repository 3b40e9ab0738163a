"""A checkpoint's tokenizer as ``tokenizer.*`` metadata of GGUF.

Byte-level BPE (tokenizer.json, or the first Qwen's qwen.tiktoken) becomes the model "gpt2", SentencePiece BPE
(tokenizer.model, or tokenizer.json with byte fallback) the model "llama".
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringlm.errors import FileFormatError, UnsupportedModelError
from ringlm.pretokenizers import name_of
from ringlm.vocab import TokenType

from .checkpoint import optional_json, read_json
from .sentencepiece_model import read_model
from .special_tokens import special_metadata, steps_of
from .tiktoken import read_tiktoken

_BYTE = re.compile("<0x[0-9A-F]{2}>")
# Control tokens that some checkpoints do not call special.
_CONTROL_LOOK = re.compile(r"<[|｜].*[|｜]>|<unused\d+>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)  # noqa: RUF001
_FAR = -1000.0  # score of tokens that no merge makes


@dataclass
class Tokens:
    """The vocabulary as it grows: texts, types and scores by id, and the metadata of its rules."""

    model: str
    texts: list[str | None]
    types: list[int]
    scores: list[float] = field(default_factory=list)  # "llama" only
    rules: dict[str, Any] = field(default_factory=dict)
    added: dict[int, dict[str, Any]] = field(default_factory=dict)  # id -> {"content", "special"}

    def ids(self) -> dict[str, int]:
        """Ids by text. Added tokens have their text as it is."""
        found = {text: i for i, text in enumerate(self.texts) if text is not None}
        found.update({token["content"]: i for i, token in self.added.items()})
        return found


def tokenizer_metadata(folder: Path, n_vocab: int) -> dict[str, Any]:
    """The metadata of the tokenizer in ``folder``, filled up to ``n_vocab`` tokens: rows of the embedding.

    Raises FileFormatError for files that are missing or contradict themselves, UnsupportedModelError for a
    kind of tokenizer that GGUF has no name for, OSError.
    """
    parsed = read_json(folder / "tokenizer.json") if (folder / "tokenizer.json").is_file() else None
    config = optional_json(folder / "tokenizer_config.json")
    if (folder / "tokenizer.model").is_file() and not _is_byte_level(parsed):
        tokens = _from_sentencepiece(folder / "tokenizer.model", config)
    elif parsed is not None and _is_byte_level(parsed):
        tokens = _from_byte_level(folder / "tokenizer.json", parsed)
    elif parsed is not None:
        tokens = _from_merges(folder / "tokenizer.json", parsed)
    elif (folder / "qwen.tiktoken").is_file():
        tokens = _from_tiktoken(folder / "qwen.tiktoken")
    else:
        raise FileFormatError(
            f"{folder}: there is no tokenizer.json and no tokenizer.model; with --no-tokenizer the file "
            "gets no vocabulary"
        )
    if len(tokens.texts) > n_vocab:
        raise FileFormatError(
            f"{folder}: the tokenizer has {len(tokens.texts)} tokens, the embedding {n_vocab} rows"
        )
    tokens.added.update(_added_tokens(folder, parsed, config))
    _add(tokens, n_vocab, folder)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": tokens.model,
        **tokens.rules,
        "tokenizer.ggml.tokens": tokens.texts,
        "tokenizer.ggml.token_type": tokens.types,
    }
    if tokens.model == "llama":
        metadata["tokenizer.ggml.scores"] = tokens.scores
    return metadata | special_metadata(folder, config, parsed, tokens.ids(), tokens.model == "llama")


def _model_of(parsed: Mapping[str, Any]) -> Mapping[str, Any]:
    model = parsed.get("model")
    return model if isinstance(model, Mapping) else {}


def _is_byte_level(parsed: Mapping[str, Any] | None) -> bool:
    """BPE over GPT-2's byte characters, told by the step that makes them."""
    if parsed is None or _model_of(parsed).get("byte_fallback"):
        return False
    return any(step.get("type") == "ByteLevel" for step in steps_of(parsed, "pre_tokenizer"))


def _from_byte_level(file: Path, parsed: Mapping[str, Any]) -> Tokens:
    vocab, merges = _bpe(file, parsed)
    texts = _by_id(file, vocab)
    tokens = Tokens("gpt2", texts, [int(TokenType.NORMAL)] * len(texts))
    try:
        pre = name_of(parsed)
    except (AttributeError, KeyError, TypeError) as e:  # parts of another type than they have to be
        raise FileFormatError(f"{file}: the normalizer or the pre_tokenizer is malformed: {e}") from None
    tokens.rules = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": _joined(merges)}
    return tokens


def _from_sentencepiece(file: Path, config: Mapping[str, Any]) -> Tokens:
    """tokenizer_config.json may change the prefix that the model was trained with."""
    model = read_model(file)
    said = config.get("add_prefix_space")
    tokens = Tokens("llama", [*model.pieces], model.types, model.scores)
    tokens.rules = {
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": said if isinstance(said, bool) else model.add_space_prefix,
    }
    return tokens


def _from_merges(file: Path, parsed: Mapping[str, Any]) -> Tokens:
    """SentencePiece BPE without its file. A piece's score is the negated rank of the first merge that makes
    it, so that the best score is the merge of lowest rank."""
    if not _model_of(parsed).get("byte_fallback"):
        raise UnsupportedModelError(
            f"{file}: the model is {_model_of(parsed).get('type')} without bytes; supported are "
            "byte-level BPE and BPE with byte_fallback"
        )
    vocab, merges = _bpe(file, parsed)
    texts = _by_id(file, vocab)
    rank: dict[str, int] = {}
    for i, (left, right) in enumerate(merges):
        rank.setdefault(left + right, i)
    types, scores = [], []
    unknown = _model_of(parsed).get("unk_token")
    for text in texts:
        if text == unknown and text is not None:
            types.append(int(TokenType.UNKNOWN))
        else:
            types.append(
                int(TokenType.BYTE if text is not None and _BYTE.fullmatch(text) else TokenType.NORMAL)
            )
        scores.append(float(-rank.get(text or "", len(merges))))
    tokens = Tokens("llama", texts, types, scores)
    tokens.rules = {
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": _has_space_prefix(parsed),
    }
    return tokens


def _has_space_prefix(parsed: Mapping[str, Any]) -> bool:
    """Whether the normalizer (Prepend) or the pre-tokenizer (Metaspace) puts a space before a text."""
    for step in (*steps_of(parsed, "normalizer"), *steps_of(parsed, "pre_tokenizer")):
        if step.get("type") == "Prepend":
            return True
        if step.get("type") == "Metaspace":
            older = "always" if step.get("add_prefix_space", True) else "never"
            return bool(step.get("prepend_scheme", older) != "never")
    return False


def _from_tiktoken(file: Path) -> Tokens:
    """The first Qwen. Its control tokens are in its code only, behind the last rank."""
    texts, merges = read_tiktoken(file)
    tokens = Tokens("gpt2", [*texts], [int(TokenType.NORMAL)] * len(texts))
    tokens.rules = {"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.merges": _joined(merges)}
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))]
    for i, text in enumerate(control, len(texts)):
        tokens.added[i] = {"content": text, "special": True}
    return tokens


def _bpe(file: Path, parsed: Mapping[str, Any]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = _model_of(parsed)
    if model.get("type", "BPE") != "BPE":
        raise UnsupportedModelError(f"{file}: the model is {model.get('type')!r}; supported is BPE")
    vocab, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocab, dict) or not isinstance(merges, list):
        raise FileFormatError(f"{file}: the model has no vocab or no merges")
    pairs = []
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(p, str) for p in pair):
            raise FileFormatError(f"{file}: the merge {merge!r:.80} is no pair of pieces")
        pairs.append((pair[0], pair[1]))
    return vocab, pairs


def _joined(merges: list[tuple[str, str]]) -> list[str]:
    return [f"{left} {right}" for left, right in merges]


def _by_id(file: Path, vocab: Mapping[str, int]) -> list[str | None]:
    """Texts by id, None for ids that are left out."""
    ids = vocab.values()
    if not vocab or not all(type(i) is int and 0 <= i < 1 << 24 for i in ids):
        raise FileFormatError(f"{file}: vocab has ids that are no small integers")
    texts: list[str | None] = [None] * (max(ids) + 1)
    for text, i in vocab.items():
        if texts[i] is not None:
            raise FileFormatError(f"{file}: {texts[i]!r} and {text!r} have the id {i} both")
        texts[i] = text
    return texts


def _added_tokens(
    folder: Path, parsed: Mapping[str, Any] | None, config: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
    """Tokens beside the model's own, by id, from the three places where they are written."""
    found: dict[int, dict[str, Any]] = {}
    for text, i in optional_json(folder / "added_tokens.json").items():
        if type(i) is int:
            found[i] = {"content": text, "special": False}
    decoder = config.get("added_tokens_decoder")
    for key, token in (decoder if isinstance(decoder, dict) else {}).items():
        if key.isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str):
            found[int(key)] = {"content": token["content"], "special": bool(token.get("special"))}
    added = (parsed or {}).get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and type(token.get("id")) is int and isinstance(token.get("content"), str):
            found[token["id"]] = {"content": token["content"], "special": bool(token.get("special"))}
    return found


def _add(tokens: Tokens, n_vocab: int, folder: Path) -> None:
    """Put the added tokens to their ids, and unused ones where an embedding row has no token."""
    n = len(tokens.texts)
    tokens.texts += [None] * (n_vocab - n)
    tokens.types += [int(TokenType.UNUSED)] * (n_vocab - n)
    if tokens.model == "llama":
        tokens.scores += [_FAR] * (n_vocab - n)
    beyond = [token["content"] for i, token in tokens.added.items() if i >= n_vocab]
    if beyond:
        warnings.warn(
            f"{folder}: {len(beyond)} added tokens have no row in the embedding and are left out: "
            f"{', '.join(map(repr, beyond[:3]))}",
            stacklevel=2,
        )
    for i, token in list(tokens.added.items()):
        if i >= n_vocab:
            del tokens.added[i]
            continue
        text = token["content"]
        control = token["special"] or _CONTROL_LOOK.fullmatch(text)
        if tokens.types[i] not in (TokenType.UNKNOWN, TokenType.BYTE):
            tokens.types[i] = int(TokenType.CONTROL if control else TokenType.USER_DEFINED)
        if tokens.texts[i] is None or tokens.model == "gpt2":
            tokens.texts[i] = text
    for i, text in enumerate(tokens.texts):
        if text is None:
            tokens.texts[i], tokens.types[i] = f"[PAD{i}]", int(TokenType.UNUSED)
