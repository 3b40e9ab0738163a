"""RoPE scaling that the caller asks for instead of what a file says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ringlm.errors import InvalidArgument

__all__ = ["rope_options"]

#: Names as in the ``rope_parameters`` of a Hugging Face config, and what the core calls them.
_NUMBERS = {
    "rope_theta": "base",
    "factor": "factor",
    "original_max_position_embeddings": "original",
    "attention_factor": "attn_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
}
_FACTORS = {"short_factor": "factors", "long_factor": "long_factors"}
_TYPES = {
    "none": "none",
    "default": "none",
    "linear": "linear",
    "ntk": "ntk",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "llama3": "llama3",
    "longrope": "longrope",
    "su": "longrope",
}
_SHAPE = ("factor", "original_max_position_embeddings", "rope_theta")
#: What a type understands.
_TAKES = {
    "none": ("rope_theta",),
    "linear": _SHAPE,
    "ntk": _SHAPE,
    "dynamic": _SHAPE,
    "yarn": (*_SHAPE, "attention_factor", "beta_fast", "beta_slow"),
    "llama3": (*_SHAPE, "low_freq_factor", "high_freq_factor"),
    "longrope": (*_SHAPE, "attention_factor", "short_factor", "long_factor"),
}
#: What a type cannot do without.
_REQUIRED = {
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}


def rope_options(rope: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The core's form of ``Model(rope=...)``. Raises InvalidArgument for a type that is not known, a key
    that it does not take, a value that is no positive number, and for what it cannot do without."""
    if rope is None:
        return None
    if not isinstance(rope, Mapping):
        raise InvalidArgument(
            f"rope is {rope!r:.80}; expected a mapping such as {{'rope_type': 'linear', 'factor': 2.0}}"
        )
    kinds = [rope[key] for key in ("rope_type", "type") if rope.get(key) is not None] or ["none"]
    kind = kinds[0]
    if not isinstance(kind, str) or kind not in _TYPES:
        raise InvalidArgument(f"rope: the type is {kind!r:.40}; there are {', '.join(_TYPES)}")
    if kinds[-1] != kind:
        raise InvalidArgument(f"rope: 'rope_type' is {kind!r} and 'type' is {kinds[-1]!r:.40}; leave one out")
    missing = [key for key in _REQUIRED.get(_TYPES[kind], ()) if rope.get(key) is None]
    if missing:
        raise InvalidArgument(f"rope: {kind!r} needs {', '.join(map(repr, missing))}")
    options: dict[str, Any] = {"scaling": _TYPES[kind]}
    takes = _TAKES[_TYPES[kind]]
    for key, value in rope.items():
        if key in ("rope_type", "type") or value is None:
            continue
        if key not in takes:
            what = "is not known" if key not in _NUMBERS | _FACTORS else f"means nothing to the type {kind!r}"
            raise InvalidArgument(f"rope: {key!r:.40} {what}, which takes {', '.join(takes)}")
        if key in _NUMBERS:
            options[_NUMBERS[key]] = _number(key, value)
        else:
            value = value.tolist() if hasattr(value, "tolist") else value  # an array of numpy
            if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
                raise InvalidArgument(f"rope: {key!r} is {value!r:.80}; expected a number for each pair")
            options[_FACTORS[key]] = [_number(key, x) for x in value]
    return options


def _number(key: str, value: Any) -> float:
    try:
        if not isinstance(value, (str, bytes, bool)) and 0.0 < (number := float(value)) < math.inf:
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidArgument(f"rope: {key!r} is {value!r:.80}; expected a positive number")
