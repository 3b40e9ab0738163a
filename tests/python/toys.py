"""A toy tokenizer and a toy native core, so that what Python does can be tested without weights."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import ringlm
from ringlm.errors import Cancelled, ContextOverflow, StateError

SPECIAL = [
    *("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>"),
    *(
        "<|end_header_id|>",
        "<start_of_turn>",
        "<end_of_turn>",
        "[INST]",
        "[/INST]",
        "<|user|>",
        "<|assistant|>",
    ),
]
# Pieces that join characters over the borders of template and message, so that a wrong cut shows.
PIECES = [
    *(
        "\n\n",
        "user\nH",
        "r\nh",
        "t\n",
        "He",
        "ll",
        "llo",
        "lo ",
        ": ",
        " a",
        "an",
        "and",
        "<|",
        "|>",
        "im",
        "\nS",
        "en",
    ),
    *(
        "end",
        "im_end",
        "start",
        "[",
        "INS",
        "ello",
        "the",
        "th",
        ". ",
        "? ",
        ".\n",
        "no",
        "yes",
        "stop",
        "==",
        "</",
    ),
]


class ToyTokenizer:
    """Longest match from the left over bytes and a few longer pieces; control tokens only with
    parse_special."""

    def __init__(
        self, special: Sequence[str] = SPECIAL, *, add_bos: bool = False, eog: str = "<|im_end|>"
    ) -> None:
        self._bytes = (
            [t.encode() for t in special] + [bytes([b]) for b in range(256)] + [p.encode() for p in PIECES]
        )
        self._n_special = len(special)
        self._special = {t: i for i, t in enumerate(special)}
        self._pieces = {t: i for i, t in enumerate(self._bytes) if i >= len(special)}
        self.add_bos = add_bos
        self.bos_id: int | None = self._special.get("<s>")
        self.eos_id: int | None = self._special.get("</s>")
        self.eog_ids = frozenset(self._special[t] for t in (eog, "</s>") if t in self._special)

    @property
    def n_vocab(self) -> int:
        return len(self._bytes)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        ids = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        if not parse_special:
            return ids + self._plain(text)
        at = done = 0
        while at < len(text):
            found = max((t for t in self._special if text.startswith(t, at)), key=len, default="")
            if found:
                ids += [*self._plain(text[done:at]), self._special[found]]
                at = done = at + len(found)
            else:
                at += 1
        return ids + self._plain(text[done:])

    def _plain(self, text: str) -> list[int]:
        data, at, ids = text.encode(), 0, []
        while at < len(data):
            n = next(n for n in range(8, 0, -1) if data[at : at + n] in self._pieces)
            ids.append(self._pieces[data[at : at + n]])
            at += len(data[at : at + n])
        return ids

    def id(self, text: str) -> int:
        return self._special[text] if text in self._special else self._pieces[text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self._bytes[i] for i in ids if not self.is_control(i)).decode(
            "utf-8", errors="replace"
        )

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token]

    def token_text(self, token: int) -> str:
        return self._bytes[token].decode("utf-8", errors="replace")

    def is_control(self, token: int) -> bool:
        return token < self._n_special

    def stream(self, skip_special: bool = True, *, continuation: bool = False) -> ToyStream:
        return ToyStream(self)


class ToyStream:
    def __init__(self, tokenizer: ToyTokenizer) -> None:
        import codecs

        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        control = self._tokenizer.is_control(token)
        return self._decoder.decode(b"" if control else self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ToyModel:
    """``script(ids) -> next id`` is the model: its logits are 0, and 10 at the next id."""

    def __init__(self, path: str, n_threads: int = 0, backend: str = "cpu") -> None:
        self.path, self.n_threads, self.backend = path, n_threads or 2, backend
        self.config = types.SimpleNamespace(n_vocab=ToyTokenizer().n_vocab, n_ctx_train=256, rope_factor=1.0)
        self.nbytes = 1000
        self.closed = False
        self.script: Callable[[list[int]], int] = lambda ids: (sum(ids) * 31 + len(ids)) % 200 + 20

    def close(self) -> None:
        self.closed = True


class ToySession:
    opened: list[ToySession] = []  # noqa: RUF012

    def __init__(
        self, model: ToyModel, n_ctx: int = 0, kv_k: str = "f16", kv_v: str = "f16", chunk: int = 128
    ) -> None:
        self._model = model
        self.n_ctx, self.chunk, self.kv = n_ctx or 256, chunk, (kv_k, kv_v)
        self.tokens: list[int] = []
        self.nbytes, self.kv_nbytes = 2000, 1000
        self.closed = False
        self.evaluated = 0  # tokens
        self._cancelled = False
        self._logits: np.ndarray | None = None
        self.fail: BaseException | None = None
        ToySession.opened.append(self)

    @property
    def position(self) -> int:
        return len(self.tokens)

    def _row(self, upto: int) -> np.ndarray:
        row = np.zeros(self._model.config.n_vocab, np.float32)
        row[self._model.script(self.tokens[:upto])] = 10
        return row

    def _begin(self, n: int) -> None:
        if self.closed:
            raise StateError("the session is closed")
        if self.position + n > self.n_ctx:
            raise ContextOverflow(f"{n} tokens after {self.position} of {self.n_ctx}")
        if self.fail is not None:
            raise self.fail

    def _check_cancel(self, consumed: int) -> None:
        if self._cancelled:
            self._cancelled = False
            raise Cancelled("cancelled", consumed)

    def prefill(self, tokens: Any, out: Any, all_logits: bool, progress: Any) -> None:
        assert tokens.dtype == np.int32
        self._begin(len(tokens))
        ids = tokens.tolist()
        start = self.position
        for at in range(0, len(ids), self.chunk):
            self._check_cancel(at)
            self.tokens += ids[at : at + self.chunk]
            self.evaluated += len(ids[at : at + self.chunk])
            if progress is not None:
                progress(min(at + self.chunk, len(ids)), len(ids))
        self._logits = self._row(self.position)
        if out is not None:
            out[:] = (
                np.stack([self._row(start + i + 1) for i in range(len(ids))]) if all_logits else self._logits
            )

    def decode(self, token: int, out: Any) -> None:
        self._begin(1)
        self._check_cancel(0)
        self.tokens.append(token)
        self.evaluated += 1
        self._logits = self._row(self.position)
        if out is not None:
            out[:] = self._logits

    def sample(self, sampler: ToySampler) -> int:
        assert self._logits is not None
        return sampler.sample(self._logits)

    def log_probability(self, token: int) -> float:
        assert self._logits is not None
        row = self._logits.astype(np.float64)
        return float(row[token] - math.log(np.exp(row).sum()))

    def top_log_probabilities(self, k: int) -> list[tuple[int, float]]:
        assert self._logits is not None
        best = np.argsort(-self._logits, kind="stable")[:k]
        return [(int(i), self.log_probability(int(i))) for i in best]

    def rewind(self, n: int) -> None:
        assert 0 <= n <= self.position
        del self.tokens[self.position - n :]
        self._logits = None

    def cancel(self, wanted: bool = True) -> None:
        self._cancelled = wanted

    def close(self) -> None:
        self.closed = True


class ToySampler:
    made: list[ToySampler] = []  # noqa: RUF012

    def __init__(self, n_vocab: int, **params: Any) -> None:
        self.n_vocab, self.params = n_vocab, params
        self.window: list[int] = []
        ToySampler.made.append(self)

    def sample(self, logits: np.ndarray) -> int:
        token = int(np.argmax(logits))
        self.window.append(token)
        return token

    def accept(self, ids: list[int]) -> None:
        self.window += ids


def script_of(*texts: str, tokenizer: ToyTokenizer, eog: bool = True) -> Callable[[list[int]], int]:
    """A model that answers its n-th prompt with the n-th text, byte by byte (so never as the tokenizer
    would).

    A prompt ends with ``<|im_start|>assistant\\n``.
    """
    opening = tokenizer.encode("<|im_start|>assistant\n", parse_special=True)
    replies = [[tokenizer.id("<unk>") + tokenizer._n_special + b for b in text.encode()] for text in texts]
    starts: dict[int, int] = {}

    def script(ids: list[int]) -> int:
        at = max(i for i in range(len(ids)) if ids[i : i + len(opening)] == opening) + len(opening)
        reply = replies[starts.setdefault(at, len(starts))]
        done = len(ids) - at
        return reply[done] if done < len(reply) else tokenizer.id("<|im_end|>") if eog else reply[-1]

    return script


@pytest.fixture
def toy_core(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Puts the toy in the place of ``ringlm._core`` and ``ringlm.tokenizer``."""
    core = types.ModuleType("ringlm._core")
    vars(core).update(Model=ToyModel, Session=ToySession, Sampler=ToySampler, GGUF=lambda path: {})
    monkeypatch.setitem(sys.modules, "ringlm._core", core)
    monkeypatch.setattr(ringlm, "_core", core, raising=False)
    tokenizer = types.ModuleType("ringlm.tokenizer")
    vars(tokenizer).update(Tokenizer=lambda path: ToyTokenizer())
    monkeypatch.setitem(sys.modules, "ringlm.tokenizer", tokenizer)
    monkeypatch.setattr(ToySession, "opened", [])
    monkeypatch.setattr(ToySampler, "made", [])
    return core
