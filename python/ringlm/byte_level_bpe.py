"""Byte-level BPE (``tokenizer.ggml.model = "gpt2"``) on Hugging Face ``tokenizers``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringlm.errors import FileFormatError
from ringlm.pretokenizers import PreTokenizer, build_splitter
from ringlm.token_matcher import TokenMatcher
from ringlm.vocab import LONE_SURROGATE, TokenType, Vocab

if TYPE_CHECKING:
    import tokenizers


def byte_characters() -> dict[str, bytes]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the others from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (b for b in range(256) if b not in printable)
    table = {chr(b): bytes([b]) for b in printable}
    table.update((chr(0x100 + n), bytes([b])) for n, b in enumerate(others))
    return table


class ByteLevelBPE:
    """Encodes text to ids and renders ids to bytes. Control tokens are the caller's.

    A byte that the vocabulary lacks is dropped, as the models' own tokenizers do (SmolLM2 lacks some
    control characters): a vocabulary's unknown token may be a control token, which text never becomes.
    """

    def __init__(self, vocab: Vocab, ids: dict[str, int], rules: PreTokenizer) -> None:
        from tokenizers import normalizers

        self._vocab = vocab
        self._bytes = byte_characters()
        self._user_defined = TokenMatcher({vocab.tokens[i]: i for i in vocab.of_type(TokenType.USER_DEFINED)})
        self._tokenizer = build_bpe(vocab, ids, ignore_merges=rules.ignore_merges)
        if rules.nfc:
            self._tokenizer.normalizer = normalizers.NFC()
        self._tokenizer.pre_tokenizer = build_splitter(rules)

    def encode(self, text: str) -> list[int]:
        """Ids of one run of text between control tokens."""
        ids: list[int] = []
        for part in self._user_defined.split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._tokenizer.encode(part, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token: int) -> bytes:
        """What the token stands for. Special tokens are spelled as text, the others in byte characters."""
        text = self._vocab.tokens[token]
        if self._vocab.types[token] in (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED):
            return text.encode("utf-8", "surrogateescape")
        return b"".join([self._bytes.get(c) or c.encode("utf-8", "surrogateescape") for c in text])


def build_bpe(vocab: Vocab, ids: dict[str, int], **options: bool) -> tokenizers.Tokenizer:
    """Merges of a vocabulary, ready to run; ``options`` are those of ``tokenizers.models.BPE``.

    Raises FileFormatError for merges that are not two tokens whose concatenation is a token.
    """
    from tokenizers import Tokenizer, models

    # Merges (or a whole word, with ignore_merges) must never give a control token: take them all out.
    ids, hidden = dict(ids), set()
    for i in vocab.of_type(TokenType.UNKNOWN, TokenType.CONTROL):
        text = vocab.tokens[i]
        if ids.get(text) == i:
            del ids[text]
            hidden.add(text)
    try:
        pairs = [tuple(line.split(" ")) for line in vocab.merges]
        model = models.BPE(vocab=ids, merges=pairs, **options)  # type: ignore[arg-type]
    except Exception:  # tokenizers has no narrower type; look closer at what it refuses
        ids = {text: i for text, i in ids.items() if not LONE_SURROGATE.search(text)}  # no text has these
        model = models.BPE(vocab=ids, merges=_checked_merges(vocab.merges, ids, hidden), **options)
    return Tokenizer(model)


def _checked_merges(lines: list[str], ids: dict[str, int], hidden: set[str]) -> list[tuple[str, str]]:
    """Pairs of "left right", without those that touch a hidden token."""
    merges = []
    for rank, line in enumerate(lines):
        left, _, right = line.partition(" ")
        if left in ids and right in ids and left + right in ids:
            merges.append((left, right))
        elif not hidden & {left, right, left + right}:
            raise FileFormatError(
                f"tokenizer.ggml.merges[{rank}] is {line!r}; expected two tokens of the vocabulary, "
                "separated by a space, whose concatenation is a token as well"
            )
    return merges
