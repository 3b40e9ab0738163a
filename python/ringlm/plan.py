"""What sessions of a model will take, to the byte, before one is opened."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ringlm.errors import InvalidArgument

if TYPE_CHECKING:
    from ringlm.model import Model

__all__ = ["Cost", "LayerKind", "Plan", "format_size", "parse_size", "plan"]


@dataclass(frozen=True)
class LayerKind:
    """Layers whose rings are alike."""

    #: Tokens of the attention window; 0: the ring of ``n_ctx``.
    window: int
    n_layer: int
    #: Rows of a ring.
    capacity: int
    #: Most tokens that a query sees.
    visible: int
    #: Tokens that never leave.
    pinned: int
    #: Bytes of K and V of all these layers, in one session.
    nbytes: int


@dataclass(frozen=True)
class Cost:
    """Bytes with another way to store K and V."""

    #: K and V of one session.
    kv_nbytes: int
    session_nbytes: int
    #: The weights and all sessions.
    total_nbytes: int


@dataclass(frozen=True)
class Plan:
    """Memory of ``sessions`` equal sessions of a model. What ends in ``nbytes`` is in bytes.

    ``session_nbytes`` is exactly the ``Session.nbytes`` of a session opened with these options.
    """

    model: str
    n_threads: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    #: The longest context: the trained length, times the factor of RoPE scaling.
    n_ctx_limit: int

    n_ctx: int
    pinned: int
    chunk: int
    #: Formats of keys and of values.
    kv: tuple[str, str]
    sessions: int

    weight_nbytes: int
    kinds: tuple[LayerKind, ...]
    #: K and V of one session: the sum over ``kinds``.
    kv_nbytes: int
    #: What flows through the layers in a step, per session.
    activation_nbytes: int
    #: Intermediate results within an operation, per session.
    scratch_nbytes: int
    #: Token ids, logits and bookkeeping, per session.
    state_nbytes: int
    session_nbytes: int
    #: The weights and all sessions.
    total_nbytes: int

    #: The same with f16 keys and values.
    f16: Cost
    #: Multi-head attention in the place of grouped-query attention: every query head has keys and values of
    #: its own.
    mha: Cost
    #: Both: what the plain cache takes.
    mha_f16: Cost

    #: What weights and sessions together may take.
    memory_nbytes: int
    fits: bool
    #: The largest ``n_ctx`` with which all sessions fit into the memory, at most ``n_ctx_limit``; 0: none.
    largest_n_ctx: int
    #: The same with int8 keys and values.
    largest_n_ctx_int8: int
    #: How many sessions of this ``n_ctx`` fit into the memory.
    most_sessions: int


def plan(
    model: Model,
    *,
    n_ctx: int | None = None,
    kv: str | tuple[str, str] = "f16",
    pinned: int = 0,
    chunk: int = 128,
    sessions: int = 1,
    memory: int | None = None,
) -> Plan:
    """Computes what ``sessions`` sessions opened with these options will take. Nothing is allocated.

    ``memory`` is in bytes; None is what this process can take now. The weights count in full, although they
    are mapped and the system can drop what is not in use. Raises InvalidArgument as Model.session does.
    """
    import ringlm._core as core

    _check("sessions", sessions, 1, "how many are open at once")
    if memory is not None:
        _check("memory", memory, 0, "bytes, or None for what is there now", 2**63)
    if n_ctx is not None:
        _check("n_ctx", n_ctx, 1, "tokens, or None for the default")
    _check("pinned", pinned, 0, "tokens that never leave")
    _check("chunk", chunk, 1, "as many tokens as one step of a prefill takes")
    pair = (kv, kv) if isinstance(kv, str) else kv
    if not isinstance(pair, tuple) or [type(name) for name in pair] != [str, str]:
        raise InvalidArgument(f"kv is {kv!r:.80}; expected 'f16', 'int8' or 'f32', or a pair for K and V")

    native: Any = core
    available = native.available_memory() if memory is None else memory
    weights = model.nbytes
    group = model.config.n_head // model.config.n_head_kv
    found = native.plan(model.core, n_ctx or 0, *pair, chunk, pinned)
    f16 = native.plan(model.core, n_ctx or 0, "f16", "f16", chunk, pinned)

    def cost(record: dict[str, Any], times: int) -> Cost:
        rows = record["kv_nbytes"] * times
        session = record["nbytes"] - record["kv_nbytes"] + rows
        return Cost(rows, session, weights + sessions * session)

    def largest(pair: tuple[str, str]) -> int:
        share = max(available - weights, 0) // sessions
        return int(native.largest_n_ctx(model.core, *pair, chunk, pinned, share))

    own, c = cost(found, 1), model.config
    return Plan(
        model=str(model.path),
        n_threads=model.n_threads,
        n_layer=c.n_layer,
        n_head=c.n_head,
        n_head_kv=c.n_head_kv,
        head_dim=c.head_dim,
        n_ctx_limit=int(c.n_ctx_train * c.rope_factor),
        n_ctx=found["n_ctx"],
        pinned=found["pinned"],
        chunk=found["chunk"],
        kv=pair,
        sessions=sessions,
        weight_nbytes=weights,
        kinds=tuple(LayerKind(**kind) for kind in found["kinds"]),
        kv_nbytes=own.kv_nbytes,
        activation_nbytes=found["activation_nbytes"],
        scratch_nbytes=found["scratch_nbytes"],
        state_nbytes=found["state_nbytes"],
        session_nbytes=own.session_nbytes,
        total_nbytes=own.total_nbytes,
        f16=cost(f16, 1),
        mha=cost(found, group),
        mha_f16=cost(f16, group),
        memory_nbytes=available,
        fits=own.total_nbytes <= available,
        largest_n_ctx=largest(pair),
        largest_n_ctx_int8=largest(("int8", "int8")),
        most_sessions=max(available - weights, 0) // own.session_nbytes,
    )


def _check(name: str, value: Any, least: int, what: str, limit: int = 2**31) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < limit:
        raise InvalidArgument(f"{name} is {value!r:.40}; expected at least {least}: {what}")


_UNITS = {"k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?) *(?:([kmgt])(i?b)?|b)?", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Bytes: ``"8GiB"``, ``"512M"`` and ``"1.5g"`` in powers of 1024, ``"8GB"`` in powers of 1000, plain
    ``"1000000"``. Rounded down. Raises InvalidArgument.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidArgument(f"{text!r:.60} is no size; expected bytes, or a number with a unit as in 8GiB")
    number, unit, end = match.groups()
    base = 1000 if (end or "").lower() == "b" else 1024
    size = int(Fraction(number) * base ** _UNITS.get((unit or "").lower(), 0))
    if size >= 2**63:
        raise InvalidArgument(f"{text!r:.60} is more than any machine has; expected less than 8 EiB")
    return size


def format_size(n: int) -> str:
    """``1.50 GiB``, ``12.0 MiB``, ``640 bytes``: three digits, powers of 1024."""
    if n < 1024:
        return f"{n} bytes"
    size, units = float(n), iter(("KiB", "MiB", "GiB"))
    unit = ""
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units, "TiB")
    return f"{size:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f} {unit}"
