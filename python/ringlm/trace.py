"""What a session's steps did: where they wrote, what they read, how long each operation took."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ringlm._core as core
    from ringlm.cache import LayerKind

__all__ = ["Trace", "TraceRecord"]


@dataclass(frozen=True)
class TraceRecord:
    """One step: a decoded token or one chunk of a prefill."""

    #: ``"prefill"``, ``"decode"``, or ``"rebuild"``: a chunk of tokens that were fed before, computed again
    #: since the text has come to a length at which the model's RoPE turns keys in another way.
    kind: str
    #: Of the step's first token.
    position: int
    n_tokens: int
    #: Where the first token's row went in the ring of n_ctx (of the widest window, if all layers have one).
    slot: int
    #: Tokens that the step's last token saw, for each of Session.kinds.
    visible: tuple[int, ...]
    #: Bytes of the weights that the step had to read: every matrix once.
    weight_bytes: int
    #: Bytes of the K/V rows that the tokens saw, those of each token counted.
    kv_bytes: int
    seconds: float
    #: Seconds by operation; over all layers, for those that a layer has.
    operations: Mapping[str, float]
    #: Bytes that each operation had to read: its weights, and for attend ``kv_bytes``.
    operation_bytes: Mapping[str, int]
    #: Heap allocations of the extension module while the step computed; a batch makes a few before and behind
    #: that, for its own bookkeeping.
    allocations: int

    def __str__(self) -> str:
        return "\n".join(_text([self]))


class Trace:
    """Iterates over the records of a session's steps, oldest first; see Session.trace.

    The iteration stops when there are no more records for now: a later one goes on with the steps that were
    made since. ``print(trace)`` shows what has not been iterated yet as tables, and takes nothing away.
    """

    def __init__(self, native: core.Session, kinds: tuple[LayerKind, ...], n: int) -> None:
        #: What ``visible`` of a record has one number for.
        self.kinds = kinds
        self._records: deque[TraceRecord] = deque(maxlen=n)
        self._native: core.Session | None = native
        native.start_trace(n)

    def __iter__(self) -> Iterator[TraceRecord]:
        return self

    def __next__(self) -> TraceRecord:
        if not self._records:
            self._take()
        if not self._records:
            raise StopIteration
        return self._records.popleft()

    def __str__(self) -> str:
        self._take()
        head = [f"[{i}] {kind}" for i, kind in enumerate(self.kinds)] if len(self.kinds) > 1 else []
        return "\n".join(head + _text(list(self._records)))

    def close(self) -> None:
        """Ends the tracing. What was recorded can still be iterated over."""
        self._take()
        native, self._native = self._native, None
        if native is not None and not native.closed:
            native.start_trace(0)

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _take(self) -> None:
        if self._native is None or self._native.closed:
            return
        for record in self._native.take_trace():
            fields: dict[str, Any] = {**record, "visible": tuple(record["visible"])}
            self._records.append(TraceRecord(**fields))


_COLUMNS = ("step", "position", "tokens", "slot", "visible", "weight_bytes", "kv_bytes", "ms", "allocations")


def _text(records: list[TraceRecord]) -> list[str]:
    """A table of the steps, and one of the milliseconds that operations took in a step of each kind, on
    average."""
    rows = [list(_COLUMNS)]
    for r in records:
        place = [r.kind, str(r.position), str(r.n_tokens), str(r.slot), "/".join(map(str, r.visible))]
        cost = [f"{r.weight_bytes:,}", f"{r.kv_bytes:,}", f"{r.seconds * 1e3:.2f}", str(r.allocations)]
        rows.append(place + cost)
    operations = list(dict.fromkeys(name for record in records for name in record.operations))
    means = [["ms by step", *operations]]
    for kind in dict.fromkeys(record.kind for record in records):
        those = [record.operations for record in records if record.kind == kind]
        mean = [sum(r.get(name, 0.0) for r in those) / len(those) for name in operations]
        means.append([kind, *(f"{seconds * 1e3:.2f}" for seconds in mean)])
    return [*_table(rows), *(["", *_table(means)] if operations else [])]


def _table(rows: list[list[str]]) -> list[str]:
    """Columns aligned: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
