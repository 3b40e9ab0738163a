"""The tokenizer of a model: text to token ids and back, from the metadata of its GGUF file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import cached_property
from operator import index
from typing import Any

from ringlm.detokenizer import TokenStream
from ringlm.errors import FileFormatError, InvalidArgument
from ringlm.token_matcher import TokenMatcher
from ringlm.vocab import LONE_SURROGATE, Metadata, TokenType, Vocab, load_vocab


class Tokenizer:
    """Opens the vocabulary of any GGUF file, also of one without tensors.

    ``Tokenizer(path)`` or ``Tokenizer(file)`` with an open ``ringlm._core.GGUF``. Supported are
    byte-level BPE (``tokenizer.ggml.model = "gpt2"``, see ``ringlm.pretokenizers``), SentencePiece BPE
    (``"llama"``), SentencePiece Unigram (``"t5"``) and BPE over characters (``"gemma4"``). Immutable, may
    be shared by threads.

    Raises UnsupportedModelError for other kinds, FileFormatError for contradicting metadata.

    A control token (``<|im_end|>``, ``</s>``…) can only be had from text with ``parse_special=True``: what
    a user types stays text. User-defined tokens are part of the language and always found.
    """

    def __init__(self, source: str | os.PathLike[str] | Metadata) -> None:
        file: Metadata = _open(source) if isinstance(source, (str, os.PathLike)) else source
        vocab = load_vocab(file)
        self._vocab = vocab
        self._ids = vocab.ids_by_text()
        self._model: Any
        self._escape: Callable[[str], str] = str
        bos_default, eos_default = vocab.model == "llama", vocab.model == "t5"
        if vocab.model == "gpt2":
            from ringlm.byte_level_bpe import ByteLevelBPE
            from ringlm.pretokenizers import find_pre_tokenizer

            rules = find_pre_tokenizer(vocab.pre)
            self._model = ByteLevelBPE(vocab, self._ids, rules)
            bos_default = rules.add_bos
        else:
            from ringlm.spm_vocab import escape

            self._escape = escape
            self._model = _character_model(vocab, self._ids)
        self._add_bos = self._wants("bos", vocab.add_bos, bos_default)
        self._add_eos = self._wants("eos", vocab.add_eos, eos_default)

    # -- text to ids --

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        ``add_special`` puts BOS before and EOS behind where the model wants them (``add_bos``,
        ``add_eos``), whether or not the text has them already. ``parse_special`` turns the texts of
        control tokens into these tokens, the longest first; without it they are ordinary text.

        SentencePiece vocabularies with ``add_space_prefix`` put a space before the text and, as each
        run is a text of its own, before the text that follows a control token. Lone surrogates are
        encoded as U+FFFD. Text is not normalized otherwise, but for the models that were trained with it: NFC
        (qwen2, qwen35, olmo…) and the rules that a Unigram vocabulary brings along.

        Raises InvalidArgument for a character that the vocabulary cannot express at all.
        """
        if LONE_SURROGATE.search(text):
            # Through UTF-16, so that two halves of a pair find together.
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        ids = [self._vocab.special["bos"]] if add_special and self._add_bos else []
        if parse_special:
            last, escaped = 0, self._escape(text)  # of the same length
            for begin, end, token in self._special.spans(escaped):
                if self.is_control(token):
                    ids += self._model.encode(text[last:begin])
                    ids.append(token)
                    last = end
            text = text[last:]
        ids += self._model.encode(text)
        if add_special and self._add_eos:
            ids.append(self._vocab.special["eos"])
        return ids

    # -- ids to text --

    def decode(self, ids: Iterable[int], skip_special: bool = True, *, continuation: bool = False) -> str:
        """Text of token ids. Bytes that are not UTF-8 become U+FFFD.

        Control and unknown tokens give no text, or their name with ``skip_special=False``. The space
        that ``encode`` put before the text (``add_space_prefix``) is taken away again, once, at the start;
        not with ``continuation=True``: these ids go on with a text, and the space belongs to it.
        """
        stream = self.stream(skip_special, continuation=continuation)
        return "".join([stream.push(token) for token in ids]) + stream.flush()

    def stream(self, skip_special: bool = True, *, continuation: bool = False) -> TokenStream:
        """A streaming ``decode`` with the same rules. For generated text pass ``continuation=True`` where
        it goes on with the prompt's text (a completion), not where it begins one (a chat's answer)."""
        return TokenStream(self, skip_special, continuation)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for: part of a character, a word with its space, the name of a
        control token. InvalidArgument for an unknown id."""
        raw: bytes = self._model.token_bytes(self._check(token))
        return raw

    # -- the vocabulary --

    def token_text(self, token: int) -> str:
        """The token as the file spells it (``Ġword``, ``▁word``, ``<0x0A>``)."""
        return self._vocab.tokens[self._check(token)]

    def id_of(self, text: str) -> int | None:
        """The id of the token that the file spells this way, None if there is none."""
        return self._ids.get(text)

    def token_type(self, token: int) -> TokenType:
        """The type that the file gives to the token."""
        return TokenType(self._vocab.types[self._check(token)])

    def is_control(self, token: int) -> bool:
        """Whether the token is control or unknown: it steers and is not text."""
        return self._vocab.types[self._check(token)] in (TokenType.CONTROL, TokenType.UNKNOWN)

    @property
    def model(self) -> str:
        """``tokenizer.ggml.model``: ``"gpt2"``, ``"llama"``, ``"t5"`` or ``"gemma4"``."""
        return self._vocab.model

    @property
    def n_vocab(self) -> int:
        return len(self._vocab.tokens)

    @property
    def bos_id(self) -> int | None:
        """Beginning of a sequence."""
        return self._vocab.special.get("bos")

    @property
    def eos_id(self) -> int | None:
        """End of a sequence."""
        return self._vocab.special.get("eos")

    @property
    def eot_id(self) -> int | None:
        """End of a turn: from the metadata, else the first well-known marker that the vocabulary has."""
        return self._vocab.special.get("eot")

    @property
    def eom_id(self) -> int | None:
        """End of a message that calls a tool; found like ``eot_id``."""
        return self._vocab.special.get("eom")

    @property
    def unk_id(self) -> int | None:
        return self._vocab.special.get("unknown")

    @property
    def pad_id(self) -> int | None:
        return self._vocab.special.get("padding")

    @property
    def eog_ids(self) -> frozenset[int]:
        """End of generation: EOS, EOT and EOM of the metadata and the well-known end markers that are
        special tokens of this vocabulary."""
        return self._vocab.eog_ids

    @property
    def add_bos(self) -> bool:
        """Whether ``encode`` puts BOS before a text. Where the file does not say: yes for SentencePiece
        BPE, llama-bpe and tekken, no otherwise."""
        return self._add_bos

    @property
    def add_eos(self) -> bool:
        """Whether ``encode`` puts EOS behind a text. Where the file does not say: for Unigram only."""
        return self._add_eos

    @property
    def add_space_prefix(self) -> bool:
        """Whether ``encode`` puts a space before a text (SentencePiece only; where the
        file does not say, BPE only)."""
        return self._vocab.add_space_prefix

    def __repr__(self) -> str:
        return f"Tokenizer(model={self.model!r}, n_vocab={self.n_vocab})"

    # -- helpers --

    @cached_property
    def _special(self) -> TokenMatcher:
        special = self._vocab.of_type(TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
        return TokenMatcher({self._escape(self._vocab.tokens[i]): i for i in special})

    def _check(self, token: int) -> int:
        i = index(token)
        if not 0 <= i < len(self._vocab.tokens):
            raise InvalidArgument(f"token id {i} is not in the vocabulary of {self.n_vocab} tokens")
        return i

    def _wants(self, name: str, said: bool | None, default: bool) -> bool:
        known = name in self._vocab.special
        if said and not known:
            raise FileFormatError(
                f"tokenizer.ggml.add_{name}_token is true, but tokenizer.ggml.{name}_token_id is missing"
            )
        return known and (default if said is None else said)


def _character_model(vocab: Vocab, ids: dict[str, int]) -> Any:
    if vocab.model == "llama":
        from ringlm.sentencepiece_bpe import SentencePieceBPE

        return SentencePieceBPE(vocab, ids)
    if vocab.model == "t5":
        from ringlm.unigram import Unigram

        return Unigram(vocab, ids)
    from ringlm.raw_bpe import RawBPE

    return RawBPE(vocab, ids)


def _open(path: str | os.PathLike[str]) -> Metadata:
    import ringlm._core as core

    return core.GGUF(path)
