"""The vocabulary of a GGUF file, read from its ``tokenizer.ggml.*`` metadata and checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

from ringlm.errors import FileFormatError, UnsupportedModelError

MODELS = ("gpt2", "llama", "t5", "gemma4")
LONE_SURROGATE = re.compile("[\ud800-\udfff]")

# Texts of tokens that end a turn, most specific first. A base model has the last ones only.
END_OF_TURN = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001
    "<end_of_utterance>",
)
END_OF_MESSAGE = ("<|eom_id|>",)
# Generation stops there too: tool calls (harmony, Gemma 4), final answers, file borders (fill in the middle).
_END_OTHERS = (
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<|tool_response>",
    "[EOS]",
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
)
# These are HTML as well, where they are USER_DEFINED (Gemma): an end only as control tokens.
_END_IF_CONTROL = ("</s>", "<eos>")
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``, the numbers of SentencePiece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Metadata(Protocol):
    """What is needed of a GGUF file: ``ringlm._core.GGUF`` or anything that answers alike."""

    def get(self, key: str, default: Any = None) -> Any: ...


@dataclass(frozen=True)
class Vocab:
    """Tokens and rules of one vocabulary. Ids are indices into ``tokens`` and ``types``."""

    model: str  # one of MODELS
    pre: str | None
    tokens: list[str]  # bytes that are not UTF-8 are lone surrogates (surrogateescape)
    types: bytes  # TokenType of each id
    scores: list[float]  # of "llama" and "t5", else empty
    merges: list[str]  # of "gpt2" and "gemma4", else empty
    add_space_prefix: bool
    remove_extra_whitespaces: bool  # "t5"
    charsmap: bytes  # "t5": SentencePiece's precompiled normalization, empty for none
    add_bos: bool | None  # None: the file does not say
    add_eos: bool | None
    special: dict[str, int] = field(default_factory=dict)  # "bos" -> id, ...
    eog_ids: frozenset[int] = frozenset()

    def of_type(self, *types: TokenType) -> list[int]:
        """All ids of these types, ascending."""
        return _ids_of_type(self.types, *types)

    def ids_by_text(self) -> dict[str, int]:
        """Ids by text. Of equal texts the last one counts, and one of the language before a control token."""
        ids = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        if len(ids) < len(self.tokens):
            control = {*self.of_type(TokenType.UNKNOWN, TokenType.CONTROL)}
            ids.update((text, i) for i, text in enumerate(self.tokens) if i not in control)
        return ids


def _ids_of_type(types: bytes, *wanted: TokenType) -> list[int]:
    pattern = re.compile(b"[" + b"".join(b"\\x%02x" % t for t in wanted) + b"]")
    return [match.start() for match in pattern.finditer(types)]


def load_vocab(file: Metadata) -> Vocab:
    """Read and check the vocabulary.

    Raises UnsupportedModelError for a kind of tokenizer that is not built in, FileFormatError for
    metadata that contradict themselves.
    """
    model = _typed(file, "tokenizer.ggml.model", str, None)
    if model is None:
        raise FileFormatError(
            "the file has no vocabulary: the key tokenizer.ggml.model is missing; "
            "convert the model again with its tokenizer"
        )
    if model not in MODELS:
        raise UnsupportedModelError(
            f"tokenizer.ggml.model is {model!r}; supported are 'gpt2' (byte-level BPE), "
            "'llama' (SentencePiece BPE), 't5' (SentencePiece Unigram) and 'gemma4' (BPE over characters)"
        )
    tokens = _strings(file, "tokenizer.ggml.tokens")
    if not tokens:
        raise FileFormatError("tokenizer.ggml.tokens is missing or empty; a vocabulary needs tokens")
    special = _special_ids(file, len(tokens))
    types = _types(file, model, tokens, special)
    scores: list[float] = []
    merges: list[str] = []
    charsmap = b""
    if model in ("gpt2", "gemma4"):
        merges = _strings(file, "tokenizer.ggml.merges")
    else:
        scores = _scores(file, len(tokens))
    if model == "t5":
        charsmap = _bytes(file, "tokenizer.ggml.precompiled_charsmap")
    # Where the file does not say, as llama.cpp does: a prefix for "llama" only.
    prefix = _typed(file, "tokenizer.ggml.add_space_prefix", bool, model == "llama")
    extra = _typed(file, "tokenizer.ggml.remove_extra_whitespaces", bool, False)
    eog_ids = _find_ends(tokens, types, special)
    return Vocab(
        model=model,
        pre=_typed(file, "tokenizer.ggml.pre", str, None),
        tokens=tokens,
        types=types,
        scores=scores,
        merges=merges,
        add_space_prefix=prefix and model in ("llama", "t5"),
        remove_extra_whitespaces=extra and model == "t5",
        charsmap=charsmap,
        add_bos=_typed(file, "tokenizer.ggml.add_bos_token", bool, None),
        add_eos=_typed(file, "tokenizer.ggml.add_eos_token", bool, None),
        special=special,
        eog_ids=eog_ids,
    )


def _typed(file: Metadata, key: str, kind: type, default: Any) -> Any:
    value = file.get(key)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise FileFormatError(f"{key} is {value!r} ({type(value).__name__}); expected {kind.__name__}")
    return value


def _strings(file: Metadata, key: str) -> list[str]:
    value = file.get(key)
    if value is None:
        return []
    # A look at the ends is enough: arrays in GGUF have one element type.
    if not isinstance(value, list) or not all(isinstance(v, str) for v in (*value[:1], *value[-1:])):
        raise FileFormatError(f"{key} is a {type(value).__name__}; expected an array of strings")
    return value


def _numbers(file: Metadata, key: str, n: int | None = None) -> Any:
    """A numeric array (of n elements) as numpy array, None when the key is missing."""
    value = file.get(key)
    if value is None:
        return None
    import numpy as np

    array = np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise FileFormatError(f"{key} is no array of numbers")
    if n is not None and len(array) != n:
        raise FileFormatError(f"{key} has {len(array)} elements, tokenizer.ggml.tokens has {n}")
    return array


def _bytes(file: Metadata, key: str) -> bytes:
    array = _numbers(file, key)
    if array is None or not len(array):
        return b""
    if array.dtype.kind == "f" or not (array.min() >= -128 and array.max() <= 255):
        raise FileFormatError(f"{key} holds {array.dtype} numbers that are no bytes; expected uint8")
    return bytes(array.astype("uint8").tobytes())  # int8 files hold the same bytes


def _scores(file: Metadata, n: int) -> list[float]:
    array = _numbers(file, "tokenizer.ggml.scores", n)
    if array is None:
        raise FileFormatError(
            "tokenizer.ggml.scores is missing; 'llama' and 't5' vocabularies choose by score"
        )
    scores: list[float] = array.tolist()
    if not (array == array).all():
        raise FileFormatError("tokenizer.ggml.scores contains NaN; merges need an order")
    return scores


def _types(file: Metadata, model: str, tokens: list[str], special: dict[str, int]) -> bytes:
    array = _numbers(file, "tokenizer.ggml.token_type", len(tokens))
    if array is not None:
        if len(array) and not (array.min() >= 1 and array.max() <= 6):
            raise FileFormatError("tokenizer.ggml.token_type has values outside 1 to 6")
        return bytes(array.astype("uint8").tobytes())
    # Files from before the key existed: the special ids and the byte tokens are known all the same.
    types = bytearray([TokenType.NORMAL]) * len(tokens)
    if model != "gpt2":
        for i, text in enumerate(tokens):
            if re.fullmatch("<0x[0-9A-F]{2}>", text):
                types[i] = TokenType.BYTE
    for name, i in special.items():
        types[i] = TokenType.UNKNOWN if name == "unknown" else TokenType.CONTROL
    return bytes(types)


def _special_ids(file: Metadata, n: int) -> dict[str, int]:
    found = {}
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding", "fim_pad", "fim_rep", "fim_sep"):
        key = f"tokenizer.ggml.{name}_token_id"
        value = _typed(file, key, int, None)
        if value is None:
            continue
        if not 0 <= value < n:
            raise FileFormatError(f"{key} is {value}; the vocabulary has {n} tokens")
        found[name] = value
    return found


def _find_ends(tokens: list[str], types: bytes, special: dict[str, int]) -> frozenset[int]:
    """The ids that end a generation. Adds "eot" and "eom" to special where only the text names them."""
    ids: dict[str, int] = {}
    for i in _ids_of_type(types, TokenType.CONTROL, TokenType.USER_DEFINED):
        if types[i] == TokenType.CONTROL or tokens[i] not in _END_IF_CONTROL:
            ids.setdefault(tokens[i], i)
    for name, texts in (("eot", END_OF_TURN), ("eom", END_OF_MESSAGE)):
        known = [ids[text] for text in texts if text in ids]
        if known:
            special.setdefault(name, known[0])
    ends = {ids[t] for t in _all_ends() if t in ids}
    # In the harmony format a message ends with <|end|> and the model goes on with the next one.
    if {"<|return|>", "<|call|>", "<|end|>"} <= ids.keys():
        ends.discard(ids["<|end|>"])
        if special.get("eot") == ids["<|end|>"]:
            special["eot"] = ids["<|return|>"]
    ends.update(special[name] for name in _END_KEYS if name in special)
    return frozenset(ends)


def _all_ends() -> Sequence[str]:
    return (*END_OF_TURN, *END_OF_MESSAGE, *_END_OTHERS, *_END_IF_CONTROL)
