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
from ringlm.errors import Cancelled, ContextOverflow, Error, InvalidArgument, StateError

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

    def __init__(
        self,
        path: str,
        n_threads: int = 0,
        backend: str = "cpu",
        window: Sequence[int] = (),
        rope: dict[str, Any] | None = None,
        repack: bool = True,
    ) -> None:
        self.path, self.n_threads, self.backend, self.rope = path, n_threads or 2, backend, rope
        self.window, self.repack = list(window), repack
        self.config = types.SimpleNamespace(n_vocab=ToyTokenizer().n_vocab, n_ctx_limit=256, n_layer=3)
        self.nbytes = 1000
        self.closed = False
        self.script: Callable[[list[int]], int] = lambda ids: (sum(ids) * 31 + len(ids)) % 200 + 20

    def close(self) -> None:
        self.closed = True


class ToySession:
    """A ring of ids: what was fed is known as long as its slot was not written again."""

    opened: list[ToySession] = []  # noqa: RUF012

    def __init__(
        self,
        model: ToyModel,
        n_ctx: int = 0,
        kv_k: str = "f16",
        kv_v: str = "f16",
        chunk: int = 128,
        pinned: int = 0,
        overflow: str = "error",
    ) -> None:
        self._model = model
        self.n_ctx, self.chunk, self.kv = n_ctx or 256, chunk, (kv_k, kv_v)
        self.pinned, self.overflow = pinned, overflow
        self.slots = self.n_ctx + chunk - 1
        self.history: list[int] = []  # all that was fed, and not taken back
        self._rows = [-1] * self.slots  # the position whose row is there
        self.nbytes, self.kv_nbytes = 2000, 1000
        self.closed = False
        self.evaluated = 0  # tokens
        self._cancelled = False
        self._logits: np.ndarray | None = None
        self.fail: BaseException | None = None
        self._trace: list[dict[str, Any]] | None = None
        ToySession.opened.append(self)

    @property
    def position(self) -> int:
        return len(self.history)

    @property
    def visible(self) -> int:
        return min(self.position, self.n_ctx)

    @property
    def evicted(self) -> int:
        return self.position - self.visible

    @property
    def tokens(self) -> list[int]:
        return [self.history[t] for t in self._seen(self.position) if self._there(t)]

    @property
    def kinds(self) -> list[dict[str, int]]:
        return plan(self._model, self.n_ctx, chunk=self.chunk, pinned=self.pinned)["kinds"]

    def _seen(self, p: int) -> list[int]:
        """Positions that the token before ``p`` saw."""
        return [t for t in range(p) if t < self.pinned or p - 1 - t < self.n_ctx - self.pinned]

    def _slot(self, p: int) -> int:
        return p if p < self.pinned else self.pinned + (p - self.pinned) % (self.slots - self.pinned)

    def _there(self, t: int) -> bool:
        return self._rows[self._slot(t)] == t

    def _row(self, upto: int) -> np.ndarray:
        row = np.zeros(self._model.config.n_vocab, np.float32)
        row[self._model.script(self.history[:upto])] = 10
        return row

    def _begin(self, n: int) -> None:
        if self.closed:
            raise StateError("the session is closed")
        if self.overflow == "error" and self.position + n > self.n_ctx:
            raise ContextOverflow(f"{n} tokens after {self.position} of {self.n_ctx}")
        if self.fail is not None:
            raise self.fail

    def _check_cancel(self, consumed: int) -> None:
        if self._cancelled:
            self._cancelled = False
            raise Cancelled("cancelled", consumed)

    def _append(self, ids: list[int], kind: str) -> None:
        if self._trace is not None:
            self._trace.append(
                {"kind": kind, "position": self.position, "n_tokens": len(ids), "visible": [self.visible]}
                | {"slot": self._slot(self.position), "weight_bytes": 1000, "kv_bytes": 2048, "seconds": 0.5}
                | {"operations": {"embed": 0.125, "attend": 0.25}, "allocations": 0}
                | {"operation_bytes": {"embed": 8, "attend": 16}}
            )
        for i in ids:
            self._rows[self._slot(self.position)] = self.position
            self.history.append(i)
        self.evaluated += len(ids)

    def prefill(self, tokens: Any, out: Any, all_logits: bool, progress: Any) -> None:
        assert tokens.dtype == np.int32
        self._begin(len(tokens))
        ids = tokens.tolist()
        start = self.position
        for at in range(0, len(ids), self.chunk):
            self._check_cancel(at)
            self._append(ids[at : at + self.chunk], "prefill")
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
        self._append([token], "decode")
        self._logits = self._row(self.position)
        if out is not None:
            out[:] = self._logits

    def sample(self, sampler: ToySampler) -> int:
        if self._logits is None:
            raise StateError("there are no logits")
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
        to = self.position - n
        if not all(self._there(t) for t in self._seen(to + 1) if t < to):
            raise InvalidArgument("rows are gone")
        if n:
            del self.history[self.position - n :]
            self._logits = None

    def reuse(self, tokens: Any) -> int:
        ids, same = tokens.tolist()[:-1], 0
        while same < min(len(ids), self.position) and self._there(same) and ids[same] == self.history[same]:
            same += 1
        self.rewind(self.position - same)
        return same

    def fork(self) -> ToySession:
        twin = ToySession(self._model, self.n_ctx, *self.kv, self.chunk, self.pinned, self.overflow)
        twin.history, twin._rows, twin._logits = list(self.history), list(self._rows), self._logits
        return twin

    def kv_rows(self, layer: int, head: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        seen = np.array(self._seen(self.position), np.int64)
        return seen, np.full((len(seen), 2), layer, np.float32), np.full((len(seen), 2), head, np.float32)

    def start_trace(self, capacity: int) -> None:
        self._trace = [] if capacity else None

    def take_trace(self) -> list[dict[str, Any]]:
        assert self._trace is not None
        taken, self._trace = self._trace, []
        return taken

    def cancel(self, wanted: bool = True) -> None:
        self._cancelled = wanted

    def close(self) -> None:
        self.closed = True


def step(sessions: list[ToySession], tokens: list[int]) -> list[Exception | None]:
    results: list[Exception | None] = []
    for session, token in zip(sessions, tokens, strict=True):
        try:
            session.decode(token, None)
            results.append(None)
        except Error as e:
            results.append(e)
    return results


def plan(model: ToyModel, n_ctx: int = 0, chunk: int = 128, pinned: int = 0, **_: Any) -> dict[str, Any]:
    n_ctx = n_ctx or 256
    window = (model.window or [0])[0]
    kind = {"window": window, "n_layer": 2, "capacity": (window or n_ctx) + chunk - 1}
    kind |= {"visible": window or n_ctx, "pinned": 0 if window else pinned, "nbytes": 3 << 20}
    return {"n_ctx": n_ctx, "kinds": [kind]}


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

    def copy(self) -> ToySampler:
        twin = ToySampler(self.n_vocab, **self.params)
        twin.window = list(self.window)
        return twin


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
    vars(core).update(step=step, plan=plan)
    monkeypatch.setitem(sys.modules, "ringlm._core", core)
    monkeypatch.setattr(ringlm, "_core", core, raising=False)
    tokenizer = types.ModuleType("ringlm.tokenizer")
    vars(tokenizer).update(Tokenizer=lambda path: ToyTokenizer())
    monkeypatch.setitem(sys.modules, "ringlm.tokenizer", tokenizer)
    monkeypatch.setattr(ToySession, "opened", [])
    monkeypatch.setattr(ToySampler, "made", [])
    return core
