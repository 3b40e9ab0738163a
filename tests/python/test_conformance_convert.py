"""Checkpoints that transformers saved, of every family, converted.

Names are compared with the gguf package's own table from Hugging Face to GGUF, numbers with the model's
parameters, and what the files compute with transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import recipes
from checkpoints import Array, read_gguf, values
from hf_llama import interleaved
from random_llama import worst
from ringlm import UnsupportedModelError, _core
from ringlm.convert import convert

NEEDS = "conformance with transformers needs: pip install 'ringlm[conformance]'"
torch = pytest.importorskip("torch", reason=NEEDS)
pytest.importorskip("transformers", reason=NEEDS)
pytestmark = pytest.mark.conformance

LIMIT = 1e-4  # largest difference over largest logit
TOKENS = [int(t) for t in np.random.default_rng(11).integers(0, 128, 100)]
TURNED = ("llama", "granite", "smollm3")  # rows of Q and K so that RoPE turns neighbours
ROPE_FACTORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
# Recipes whose files the runtime cannot open yet.
NOT_RUN = {
    name for name in recipes.names() if name not in ("llama-mha", "llama-3", "llama-linear-tied", "mistral")
}


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=recipes.names())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """Name, model and file."""
    folder = tmp_path_factory.mktemp(request.param)
    model = recipes.build(request.param)
    recipes.save(model, request.param, folder / "m")
    convert(folder / "m", folder / "m.gguf", "f32", tokenizer=False)
    return request.param, model, folder / "m.gguf"


def saved(folder: Path) -> dict[str, Array]:
    """The tensors of the language model under the names of a checkpoint of it alone."""
    from safetensors.numpy import load_file

    return {
        name.removeprefix("language_model."): array
        for name, array in load_file(folder / "model.safetensors").items()
        if not name.startswith(("vision_tower.", "multi_modal_projector."))
    }


def test_names_and_numbers(case: tuple[str, Any, Path]) -> None:
    _, _, path = case
    metadata, found = read_gguf(path)
    arch = metadata["general.architecture"]
    kind = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    n_layer = metadata[f"{arch}.block_count"]
    table = gguf.get_tensor_name_map(kind, n_layer)
    # The package's mixtures have no layers without experts; these are named as in all other models.
    dense = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, n_layer)
    suffixes = (".weight", ".bias")
    heads = {"attn_q": f"{arch}.attention.head_count", "attn_k": f"{arch}.attention.head_count_kv"}

    expected: dict[str, Array] = {}
    experts: dict[str, dict[int, Array]] = {}
    for name, array in saved(path.parent / "m").items():
        expert = re.search(r"\.experts\.(\d+)\.", name)
        plain = name if expert is None else name.replace(expert[0], ".experts.")
        ours = table.get_name(plain, suffixes) or dense.get_name(plain, suffixes)
        assert ours is not None, name
        part = ours.split(".")[-2]
        if arch in TURNED and part in heads:
            array = interleaved(array, metadata[heads[part]])
        elif arch.startswith("gemma") and part.endswith("norm"):
            array = array + np.float32(1)
        if expert is not None:
            experts.setdefault(ours, {})[int(expert[1])] = array
        else:
            expected[ours] = array.squeeze()
    for ours, by_expert in experts.items():
        expected[ours] = np.stack([by_expert[e] for e in range(len(by_expert))])
        assert len(by_expert) == metadata[f"{arch}.expert_count"]

    assert found.keys() - ROPE_FACTORS == expected.keys()
    known = {gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[kind]}
    if path.parent.name.startswith(("qwen2moe-dense", "qwen3moe-dense")):
        known |= {f"blk.{{bid}}.ffn_{part}" for part in ("gate", "up", "down")}
    for name, tensor in found.items():
        assert re.sub(r"blk\.\d+", "blk.{bid}", name).rsplit(".", 1)[0] in known, name
        if name not in ROPE_FACTORS:
            np.testing.assert_array_equal(values(tensor), expected[name], name)


def all_logits(path: Path) -> Array:
    model = _core.Model(str(path), 2, "cpu")
    session = _core.Session(model, kv_k="f32", kv_v="f32", chunk=64)
    out = np.full((len(TOKENS), model.config.n_vocab), np.nan, np.float32)
    session.prefill(np.array(TOKENS, np.int32), out, all_logits=True)
    return out


def test_logits(case: tuple[str, Any, Path], record_property: Callable[..., None]) -> None:
    name, model, path = case
    if name in NOT_RUN:
        with pytest.raises(UnsupportedModelError):
            all_logits(path)
        return
    error = worst(all_logits(path), recipes.reference_logits(model, TOKENS))
    record_property("worst_relative_error", error)
    assert error < LIMIT


@pytest.mark.parametrize(
    "name, field, value",
    [
        ("mistral", "sliding_window", None),
        ("phi3", "sliding_window", None),
        ("gemma2", "sliding_window", 4096),
        ("gemma2", "attn_logit_softcapping", None),
        ("gemma2", "final_logit_softcapping", None),
        ("gemma2-query-scale", "query_pre_attn_scalar", 64),
        ("gemma3", "sliding_window", 4096),
        ("gemma3-irregular", "layer_types", ["full_attention"] * 4),
        ("gemma3-irregular", "final_logit_softcapping", None),
        ("granite", "attention_multiplier", 0.125),
        ("granite", "residual_multiplier", 1.0),
        ("granite", "embedding_multiplier", 1.0),
        ("granite", "logits_scaling", 1.0),
        ("mixtral", "num_experts_per_tok", 3),
        ("qwen2moe", "norm_topk_prob", True),
        ("qwen3moe", "norm_topk_prob", False),
        ("smollm3", "no_rope_layers", [1] * 5),
    ],
)
def test_recipes_show_their_features(name: str, field: str, value: Any) -> None:
    """A recipe whose feature has no effect would prove nothing."""
    import copy

    model = recipes.build(name)
    expected = recipes.reference_logits(model, TOKENS)
    config = copy.deepcopy(model.config)
    setattr(config, field, value)
    other = type(model)(config).double().eval()
    other.load_state_dict(model.state_dict())
    assert worst(recipes.reference_logits(other, TOKENS), expected) > 1000 * LIMIT


@pytest.mark.parametrize("name", ["llama-yarn", "llama-linear-tied", "llama-3", "phi3-longrope", "phi4-mini"])
def test_recipes_show_their_rope_scaling(name: str) -> None:
    import copy

    model = recipes.build(name)
    expected = recipes.reference_logits(model, TOKENS)
    config = copy.deepcopy(model.config)
    if "long_factor" in config.rope_parameters:  # the factors of short texts throughout
        config.rope_parameters["long_factor"] = config.rope_parameters["short_factor"]
    else:
        theta = config.rope_parameters["rope_theta"]
        config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
    other = type(model)(config).double().eval()
    other.load_state_dict(model.state_dict())
    assert worst(recipes.reference_logits(other, TOKENS), expected) > 1000 * LIMIT
