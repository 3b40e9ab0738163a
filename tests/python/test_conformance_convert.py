"""Checkpoints that transformers saved, of every family, converted.

Names are compared with the gguf package's own table from Hugging Face to GGUF, numbers with the checkpoint's.
test_conformance_families.py compares what the files compute."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import recipes
from checkpoints import Array, read_gguf, values
from hf_llama import interleaved
from ringlm.convert import convert

NEEDS = "conformance with transformers needs: pip install 'ringlm[conformance]'"
pytest.importorskip("torch", reason=NEEDS)
pytest.importorskip("transformers", reason=NEEDS)
pytestmark = pytest.mark.conformance

TURNED = ("llama", "granite", "smollm3")  # rows of Q and K so that RoPE turns neighbours
ROPE_FACTORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}


def saved(folder: Path) -> dict[str, Array]:
    """The tensors of the language model under the names of a checkpoint of it alone."""
    from safetensors.numpy import load_file

    return {
        name.removeprefix("language_model."): array
        for name, array in load_file(folder / "model.safetensors").items()
        if not name.startswith(("vision_tower.", "multi_modal_projector."))
    }


@pytest.mark.parametrize("recipe", ["mixtral", "qwen2moe", "qwen3moe"])
def test_experts_as_transformers_5_holds_them(tmp_path: Path, recipe: str) -> None:
    """Fused in a checkpoint, which it writes on request, as well as one by one."""
    model = recipes.build(recipe)
    recipes.save(model, recipe, tmp_path / "apart" / "m")
    model.float().save_pretrained(tmp_path / "fused" / "m", save_original_format=False)
    for name in ("apart", "fused"):
        convert(tmp_path / name / "m", tmp_path / f"{name}.gguf", "f16", tokenizer=False)
    assert (tmp_path / "apart.gguf").read_bytes() == (tmp_path / "fused.gguf").read_bytes()


@pytest.mark.parametrize("recipe", recipes.names())
def test_names_and_numbers(tmp_path: Path, recipe: str) -> None:
    folder = recipes.save(recipes.build(recipe), recipe, tmp_path / "m")
    convert(folder, tmp_path / "m.gguf", "f32", tokenizer=False)
    metadata, found = read_gguf(tmp_path / "m.gguf")
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
    for name, array in saved(folder).items():
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
    if recipe.startswith(("qwen2moe-dense", "qwen3moe-dense")):
        known |= {f"blk.{{bid}}.ffn_{part}" for part in ("gate", "up", "down")}
    for name, tensor in found.items():
        assert re.sub(r"blk\.\d+", "blk.{bid}", name).rsplit(".", 1)[0] in known, name
        if name not in ROPE_FACTORS:
            np.testing.assert_array_equal(values(tensor), expected[name], name)
