"""What a config says about RoPE, as GGUF metadata and factor tensors.

Formulas: YaRN (arXiv:2309.00071), LongRoPE (arXiv:2402.13753) and the blend of Llama 3.1, each as
transformers has it; the keys are those of the GGUF specification and of llama.cpp.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from ringlm.errors import FileFormatError, UnsupportedModelError

from .config import Config

Factors = dict[str, npt.NDArray[np.float32]]
Metadata = dict[str, Any]

_TYPES = "default, linear, yarn, llama3, longrope"


def parameters(config: Config) -> Config:
    """The RoPE fields in one place: from rope_parameters, or rope_theta and rope_scaling."""
    fields: dict[str, Any] = {
        key: config.get(key)
        for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
        if key in config
    }
    for key in ("rope_parameters", "rope_scaling"):
        if key in config:
            fields.update({k: v for k, v in config.table(key).items() if v is not None})
    return Config(config.file, fields)


def rope(params: Config, n_ctx: int, n_rot: int, may_be_yarn: bool = True) -> tuple[Metadata, Factors]:
    """Metadata (keys without the architecture) and tensors [n_rot / 2] by name.

    `may_be_yarn`: False for Phi-3, whose first files say yarn where they mean longrope.
    Raises UnsupportedModelError for a scaling that GGUF has no words for, FileFormatError.
    """
    metadata: Metadata = {
        "rope.dimension_count": n_rot,
        "rope.freq_base": params.positive("rope_theta"),
    }
    kinds = [params.get(key) for key in ("rope_type", "type") if params.get(key)] or ["default"]
    kind = kinds[0]
    if kinds[-1] != kind:
        raise FileFormatError(f"{params.file}: rope_type is {kind!r} and type is {kinds[-1]!r}")
    if kind in ("su", "yarn") and not may_be_yarn:
        kind = "longrope"
    if kind == "default":
        return metadata, {}
    if kind == "linear":
        metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": params.positive("factor")}
        return metadata, {}
    if kind == "yarn":
        return metadata | _yarn(params, n_ctx), {}
    if kind == "llama3":
        return metadata, {"rope_freqs.weight": _llama3_factors(params, n_rot, metadata["rope.freq_base"])}
    if kind == "longrope":
        long = _longrope(params, n_ctx)
        factors = {
            f"rope_factors_{which}.weight": np.array(
                params.numbers(f"{which}_factor", n_rot // 2), np.float32
            )
            for which in ("long", "short")
        }
        return metadata | long, factors
    if kind == "dynamic":
        warnings.warn(
            f"{params.file}: dynamic RoPE scaling depends on the length of the text and is left out; the "
            "model reads up to its trained length, and more can be asked for when it is run",
            stacklevel=2,
        )
        return metadata, {}
    raise UnsupportedModelError(f"{params.file}: RoPE scaling of type {kind!r}; supported are {_TYPES}")


def _original_length(params: Config, n_ctx: int) -> int:
    key = "original_max_position_embeddings"
    return params.integer(key) if key in params else n_ctx


def _yarn(params: Config, n_ctx: int) -> Metadata:
    original = _original_length(params, n_ctx)
    factor = params.positive("factor") if "factor" in params else n_ctx / original
    if factor == 1.0 and "factor" not in params:
        raise FileFormatError(f"{params.file}: YaRN without a factor and without a shorter original length")
    if "truncate" in params and not params.flag("truncate"):
        raise UnsupportedModelError(f"{params.file}: YaRN with truncate = false; GGUF has no key for it")
    metadata: Metadata = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": original,
    }
    for key in ("beta_fast", "beta_slow"):
        if key in params:
            metadata[f"rope.scaling.yarn_{key}"] = params.positive(key)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    # GGUF's factor multiplies the one that YaRN has by itself.
    if "attention_factor" in params:
        metadata["rope.scaling.attn_factor"] = params.positive("attention_factor") / mscale(1.0)
    elif "mscale" in params and "mscale_all_dim" in params:
        ratio = mscale(params.positive("mscale")) / mscale(params.positive("mscale_all_dim"))
        metadata["rope.scaling.attn_factor"] = ratio / mscale(1.0)
    return metadata


def _llama3_factors(params: Config, n_rot: int, theta: float) -> npt.NDArray[np.float32]:
    """What each frequency is divided by: 1 for short waves, the factor for long ones, blended between."""
    factor, original = params.positive("factor"), params.integer("original_max_position_embeddings")
    low, high = params.positive("low_freq_factor"), params.positive("high_freq_factor")
    if not high > low:
        raise FileFormatError(f"{params.file}: low_freq_factor {low} is not below high_freq_factor {high}")
    wavelength = 2 * np.pi * theta ** (np.arange(0, n_rot, 2) / n_rot)
    kept = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return (1.0 / (kept + (1.0 - kept) / factor)).astype(np.float32)


def _longrope(params: Config, n_ctx: int) -> Metadata:
    original = _original_length(params, n_ctx)
    if original < 2:
        raise FileFormatError(
            f"{params.file}: original_max_position_embeddings is {original}; expected 2 or more"
        )
    factor = params.positive("factor") if "factor" in params else n_ctx / original
    if "attention_factor" in params:
        attention = params.positive("attention_factor")
    else:
        attention = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
    return {
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": attention,
    }
