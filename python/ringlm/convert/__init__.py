"""Checkpoints of Hugging Face transformers (config.json, safetensors, tokenizer) become GGUF files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringlm.errors import FileFormatError, InvalidArgument, UnsupportedModelError
from ringlm.rewrite import Progress

from .checkpoint import Checkpoint
from .config import Config
from .families import FAMILIES, Family
from .four_bit import reader_for
from .hyperparameters import common_metadata, sizes
from .plan import Planner
from .rope import Factors, Metadata, parameters, rope
from .tokenizer import tokenizer_metadata
from .write import write

__all__ = ["TYPES", "Conversion", "Progress", "convert"]

#: --type and the number that general.file_type has for it
TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7}


@dataclass(frozen=True)
class Conversion:
    """What was written."""

    path: Path
    architecture: str
    n_tensors: int
    nbytes: int


def convert(
    folder: str | Path,
    target: str | Path,
    type: str = "f16",
    *,
    tokenizer: bool = True,
    progress: Progress | None = None,
) -> Conversion:
    """Convert the checkpoint in ``folder`` to the GGUF file ``target``, which is replaced if it is there.

    ``type`` is that of the matrices: f32, f16, q8_0, q4_0 or q4_1. ``tokenizer=False`` leaves the vocabulary
    out. The target appears when it is complete; a failed or interrupted conversion leaves nothing.

    Raises InvalidArgument for another type or no folder, UnsupportedModelError for an architecture or a
    feature that has no GGUF form, FileFormatError for a checkpoint that contradicts itself, NumericError for
    numbers that do not fit the type, OSError.
    """
    folder, target = Path(folder), Path(target)
    if type not in TYPES:
        raise InvalidArgument(f"type is {type!r}; expected {', '.join(TYPES)}")
    if not folder.is_dir():
        raise InvalidArgument(f"{folder} is no folder; expected one with config.json and safetensors")
    model = describe(folder)
    metadata: Metadata = {
        "general.type": "model",
        "general.name": folder.resolve().name,
        "general.file_type": TYPES[type],
        "general.quantization_version": 2,
        **model.metadata,
    }
    if tokenizer:
        metadata |= tokenizer_metadata(folder, model.sizes["vocab"])
    checkpoint = Checkpoint(folder)
    own = [file for file in folder.iterdir() if file.suffix != ".gguf"] + list(checkpoint.files)
    if target.exists() and any(target.samefile(file) for file in own if file.exists()):
        raise InvalidArgument(f"{target} is a file of the checkpoint; give another name for the output")
    four_bit = None
    if model.quantization is not None:
        four_bit = reader_for(model.quantization, checkpoint.array, checkpoint.__contains__)
    planner = Planner(checkpoint, model.family, model.sizes, type, four_bit)
    tensors = planner.plan(model.config, model.factors)
    size = write(target, model.family.arch, metadata, tensors, progress)
    return Conversion(target, model.family.arch, len(tensors), size)


@dataclass(frozen=True)
class Description:
    """A model as its config.json describes it. Keys of ``metadata`` are without the architecture's name."""

    family: Family
    config: Config
    sizes: dict[str, int]
    metadata: Metadata
    factors: Factors
    quantization: dict[str, Any] | None  # of AWQ and GPTQ checkpoints


def describe(folder: Path) -> Description:
    """Read config.json. Raises FileFormatError, UnsupportedModelError, OSError."""
    file = Config.read(folder)
    quantization = _quantization(file)
    config, family = _family(file)
    found = sizes(config)
    rope_metadata, factors = _rope(config, family, found)
    metadata = {
        **common_metadata(config, family.arch, family.activations, found),
        **rope_metadata,
        **family.extra(config, found),
    }
    return Description(family, config, found, metadata, factors, quantization)


def _family(config: Config) -> tuple[Config, Family]:
    """The config of the text model with its defaults."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise UnsupportedModelError(
            f"{config.file}: architectures is {names!r}; supported are {', '.join(FAMILIES)}"
        )
    if "text_config" in config:
        config = config.section("text_config")
    return config.read_as(FAMILIES[name].defaults, FAMILIES[name].aliases), FAMILIES[name]


def _rope(config: Config, family: Family, found: dict[str, int]) -> tuple[Metadata, Factors]:
    params = parameters(config)
    partial = params.number("partial_rotary_factor") if "partial_rotary_factor" in params else 1.0
    if not 0 < partial <= 1:
        raise FileFormatError(f"{config.file}: partial_rotary_factor is {partial}; expected 0 to 1")
    if partial != 1 and family.arch != "phi3":
        raise UnsupportedModelError(
            f"{config.file}: partial_rotary_factor {partial}; only Phi-3 may have one"
        )
    n_rot = int(found["head_dim"] * partial)
    if n_rot < 2 or n_rot % 2:
        raise FileFormatError(
            f"{config.file}: partial_rotary_factor turns {n_rot} numbers of a head; RoPE turns pairs"
        )
    if family.two_ropes:
        return _two_ropes(config, params, found, family.may_be_yarn)
    return rope(params, found["ctx"], n_rot, family.may_be_yarn)


def _two_ropes(
    config: Config, params: Config, found: dict[str, int], may_be_yarn: bool
) -> tuple[Metadata, Factors]:
    """Layers with a window have a base of their own (Gemma 3) or the same (OLMo 3); only the others scale."""
    everywhere, local = params, config.get("rope_local_base_freq")
    if "full_attention" in params:
        everywhere = Config(
            config.file, {"rope_theta": params.get("rope_theta"), **params.table("full_attention")}
        )
    if "sliding_attention" in params:
        windowed = params.section("sliding_attention")
        if (windowed.get("rope_type") or "default") != "default":
            raise UnsupportedModelError(f"{config.file}: RoPE scaling in layers with a window")
        local = windowed.get("rope_theta") or local
    metadata, factors = rope(everywhere, found["ctx"], found["head_dim"])
    kind = metadata.get("rope.scaling.type", "linear")
    if factors or (kind != "linear" and not (kind == "yarn" and may_be_yarn)):
        kinds = "linear or yarn" if may_be_yarn else "linear"
        raise UnsupportedModelError(
            f"{config.file}: RoPE scaling of type {kind!r}; this family has {kinds}, or none"
        )
    if local is None:
        local = metadata["rope.freq_base"]
    metadata["rope.freq_base_swa"] = Config(config.file, {"rope_local_base_freq": local}).number(
        "rope_local_base_freq"
    )
    return metadata, factors


def _quantization(config: Config) -> dict[str, Any] | None:
    if "quantization_config" not in config:
        return None
    fields = config.table("quantization_config")
    method = fields.get("quant_method")
    if method not in ("awq", "gptq"):
        raise UnsupportedModelError(
            f"{config.file}: quant_method is {method!r}; supported are awq and gptq. "
            "Convert the model that was not quantized"
        )
    return fields
