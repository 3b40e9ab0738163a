"""What a session's cache is: its options, its figures, its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from ringlm.errors import InvalidArgument

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["KV", "KV_FORMATS", "CacheOptions", "LayerKind", "SessionStats", "cache_options", "check_count"]

KV_FORMATS = ("f16", "int8", "f32")


@dataclass(frozen=True)
class SessionStats:
    """What a session has done since it was opened, and where its ring stands."""

    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    #: A step of a batch counts with its whole time for each of its sessions.
    decode_seconds: float
    #: Tokens fed, which is the position of the next one.
    position: int
    #: Tokens that the last one saw, itself included (in the layers that see the most).
    visible: int
    #: Tokens fed that are out of sight: position - visible.
    evicted: int
    #: Rows of the widest ring: n_ctx + chunk - 1, or fewer if every layer has a window.
    slots: int


@dataclass(frozen=True)
class LayerKind:
    """Layers whose rings are alike."""

    #: Tokens that a token sees, itself included; 0: the session's n_ctx.
    window: int
    n_layer: int
    #: Rows of the ring.
    capacity: int
    #: Most tokens that one sees.
    visible: int
    #: The first tokens that never leave.
    pinned: int
    #: K and V of all these layers.
    nbytes: int

    def __str__(self) -> str:
        what = f"window {self.window}" if self.window else f"{self.pinned} pinned"
        layers = f"{self.n_layer} layer" + ("" if self.n_layer == 1 else "s")
        mib = self.nbytes / 2**20
        return f"{layers}, {what}: {self.capacity} slots, {self.visible} visible, {mib:.1f} MiB"


class KV(NamedTuple):
    """Rows of one KV head in position order, as Session.kv returns them."""

    #: int64 [n]
    positions: npt.NDArray[np.int64]
    #: float32 [n, head_dim], after RoPE
    k: npt.NDArray[np.float32]
    #: float32 [n, head_dim]
    v: npt.NDArray[np.float32]


class CacheOptions(TypedDict):
    """The arguments of core.Session and core.plan."""

    n_ctx: int
    kv_k: str
    kv_v: str
    chunk: int
    pinned: int
    overflow: str


def cache_options(
    n_ctx: int | None, kv: str | tuple[str, str], chunk: int, pinned: int, overflow: str
) -> CacheOptions:
    """The options of a session as the core takes them; it checks what depends on the model. Raises
    InvalidArgument."""
    if n_ctx is not None:
        n_ctx = check_count("n_ctx", n_ctx, 1, "a positive number of tokens, or None for the default")
    chunk = check_count("chunk", chunk, 1, "a positive number of tokens, as many as one step takes")
    pinned = check_count("pinned", pinned, 0, "how many of the first tokens stay for ever, at least 0")
    pair = (kv, kv) if isinstance(kv, str) else kv
    if not isinstance(pair, tuple) or len(pair) != 2 or not all(name in KV_FORMATS for name in pair):
        raise InvalidArgument(
            f"kv is {kv!r:.80}; expected 'f16', 'int8' or 'f32', or a pair of them for keys and values"
        )
    if overflow not in ("error", "slide"):
        raise InvalidArgument(
            f"overflow is {overflow!r:.40}; expected 'error', or 'slide' to let the oldest tokens leave"
        )
    return {
        "n_ctx": n_ctx or 0,
        "kv_k": pair[0],
        "kv_v": pair[1],
        "chunk": chunk,
        "pinned": pinned,
        "overflow": overflow,
    }


def check_count(name: str, value: Any, least: int, expected: str, most: int = 2**31 - 1) -> int:
    """The value as an int. Raises InvalidArgument for what is none, and outside [least, most]."""
    if hasattr(value, "__index__") and not isinstance(value, bool):
        count = int(value)
        if least <= count <= most:
            return count
        if count > most:
            expected += f", at most {most}"
    raise InvalidArgument(f"{name} is {value!r:.40}; expected {expected}")
