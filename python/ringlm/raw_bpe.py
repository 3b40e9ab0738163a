"""BPE over characters (``tokenizer.ggml.model = "gemma4"``) on Hugging Face ``tokenizers``.

SentencePiece's spelling (U+2581 for a space, byte tokens for what is no piece) with a list of merges in place
of scores, over whole texts: nothing is cut into words first.
"""

from __future__ import annotations

from ringlm.byte_level_bpe import build_bpe
from ringlm.errors import FileFormatError
from ringlm.spm_vocab import escape, token_bytes
from ringlm.token_matcher import TokenMatcher
from ringlm.vocab import TokenType, Vocab


class RawBPE:
    """Encodes text to ids and renders ids to bytes. Control tokens are the caller's."""

    def __init__(self, vocab: Vocab, ids: dict[str, int]) -> None:
        missing = [name for b in range(256) if (name := f"<0x{b:02X}>") not in ids]
        if missing:
            raise FileFormatError(
                f"tokenizer.ggml.tokens lacks {len(missing)} byte tokens, first {missing[0]}; a 'gemma4' "
                "vocabulary spells with them what is no token"
            )
        self._vocab = vocab
        user = {escape(vocab.tokens[i]): i for i in vocab.of_type(TokenType.USER_DEFINED)}
        self._user_defined = TokenMatcher(user)
        self._tokenizer = build_bpe(vocab, ids, byte_fallback=True)

    def encode(self, text: str) -> list[int]:
        """Ids of one run of text between control tokens."""
        ids: list[int] = []
        for part in self._user_defined.split(escape(text)):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._tokenizer.encode(part, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token: int) -> bytes:
        """What the token stands for: one byte for a byte token, else its text with spaces restored."""
        return token_bytes(self._vocab, token)
