"""What sessions of a model will take, to the byte, before one is opened."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ringlm.cache import LayerKind, cache_options
from ringlm.errors import InvalidArgument

if TYPE_CHECKING:
    from ringlm.model import Model

__all__ = ["Cost", "Plan", "format_size", "parse_size", "plan"]


@dataclass(frozen=True)
class Cost:
    """Bytes with another way to store K and V."""

    #: K and V of one session.
    kv_nbytes: int
    session_nbytes: int
    #: The weights, what is shared, and all sessions.
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
    #: What the model takes besides, for all sessions: float32 copies of norms and biases, scratch of threads.
    shared_nbytes: int
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
    #: The weights, what is shared, and all sessions.
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

    ``memory`` is in bytes; None is what this process can take now, or what the GPU has for the weights and
    sessions. The weights count in full, although on the CPU they may be mapped, and the system can drop what
    is not in use. Raises InvalidArgument as Model.session does for a session that does not slide.
    """
    _check("sessions", sessions, 1, "a number of sessions, at least 1", 2**31)
    if memory is not None:
        _check("memory", memory, 0, "a number of bytes, or None for what is there now", 2**63)
    options = cache_options(n_ctx, kv, chunk, pinned, "error")
    import ringlm._core as core

    weights, shared, config = model.core.packed_nbytes or model.nbytes, model.core.shared_nbytes, model.config
    if memory is not None:
        available = memory
    else:
        available = model.core.available_memory() + (weights if model.backend == "cuda" else 0)
    found = core.plan(model.core, **options)
    f16 = core.plan(model.core, **(options | {"kv_k": "f16", "kv_v": "f16"}))

    def cost(record: core._Plan, heads: int) -> Cost:
        rows = record["kv_nbytes"] * heads // config.n_head_kv
        session = record["nbytes"] - record["kv_nbytes"] + rows
        return Cost(rows, session, weights + shared + sessions * session)

    def largest(kv_k: str, kv_v: str) -> int:
        share = max(available - weights - shared, 0) // sessions
        return core.largest_n_ctx(model.core, kv_k, kv_v, chunk, pinned, share)

    own = cost(found, config.n_head_kv)
    return Plan(
        model=str(model.path),
        n_threads=model.n_threads,
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_head_kv=config.n_head_kv,
        head_dim=config.head_dim,
        n_ctx_limit=config.n_ctx_limit,
        n_ctx=found["n_ctx"],
        pinned=found["pinned"],
        chunk=found["chunk"],
        kv=(options["kv_k"], options["kv_v"]),
        sessions=sessions,
        weight_nbytes=weights,
        shared_nbytes=shared,
        kinds=tuple(LayerKind(**kind) for kind in found["kinds"]),
        kv_nbytes=own.kv_nbytes,
        activation_nbytes=found["activation_nbytes"],
        scratch_nbytes=found["scratch_nbytes"],
        state_nbytes=found["state_nbytes"],
        session_nbytes=own.session_nbytes,
        total_nbytes=own.total_nbytes,
        f16=cost(f16, config.n_head_kv),
        mha=cost(found, config.n_head),
        mha_f16=cost(f16, config.n_head),
        memory_nbytes=available,
        fits=own.total_nbytes <= available,
        largest_n_ctx=largest(options["kv_k"], options["kv_v"]),
        largest_n_ctx_int8=largest("int8", "int8"),
        most_sessions=max(available - weights - shared, 0) // own.session_nbytes,
    )


def _check(name: str, value: Any, least: int, expected: str, limit: int) -> None:
    if not isinstance(value, int) or not least <= value < limit:
        raise InvalidArgument(f"{name} is {value!r:.40}; expected {expected}")


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
