"""Every architecture and weight type with device="cuda", against the CPU: on a GPU, or on the host by the
executor of CUDA kernels, where RINGLM_CUDA_LIBRARY names libringlm_cuda_executor.so (docs/cuda.md)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ringlm
from family_sessions import PLAIN, TEXT, fed, reloaded
from random_family import FAMILIES, write
from random_llama import Array
from ringlm import DeviceError, _core

pytestmark = pytest.mark.gpu

#: Largest difference over largest logit. Decode multiplies in integers of 16 bits; a prefill, in f16.
CLOSE = 5e-3
TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


def open_model(path: str, device: str, **options: Any) -> Any:
    try:
        return _core.Model(Path(path), 2, device, **options)
    except DeviceError as error:
        if "RINGLM_CUDA_LIBRARY" in os.environ:
            raise
        pytest.skip(str(error))


def difference(found: Array, expected: Array) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def compare(path: str, pieces: list[int], n: int, **options: Any) -> float:
    """Of a whole text. In f16: codes of INT8 rows that round the other way would make it larger."""
    logits = []
    for device in ("cuda", "cpu"):
        session = _core.Session(open_model(path, device), kv_k="f16", kv_v="f16", chunk=16, **options)
        logits.append(fed(session, TEXT[:n], pieces))
    return difference(*logits)


def compare_int8(path: str, n: int, **options: Any) -> float:
    """Of some tokens on the same INT8 rows, that the CPU has computed from the n tokens before."""
    here = _core.Session(open_model(path, "cpu"), kv_k="int8", kv_v="int8", chunk=16, **options)
    here.prefill(TEXT[:n])
    there = reloaded(here, open_model(path, "cuda"))
    return difference(fed(there, TEXT[n : n + 3], [1]), fed(here, TEXT[n : n + 3], [1]))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_an_architecture(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", FAMILIES[name].with_(head_dim=64, types=PLAIN))
    # A short prefill, one of several chunks of which the last is short too, and tokens one by one.
    assert compare(path, [5, 20, 1, 1], 28) < CLOSE
    assert compare_int8(path, 30) < CLOSE


@pytest.mark.parametrize("name", TYPES)
def test_a_type_of_weights(name: str, tmp_path: Path) -> None:
    family = FAMILIES["llama"].with_(head_dim=64, n_embd=256, n_ff=512, types={"default": name})
    assert compare(write(tmp_path / "m.gguf", family), [12, 3, 1], 16) < CLOSE


@pytest.mark.parametrize(
    ("head_dim", "n_head", "n_head_kv"), [(64, 7, 1), (80, 3, 1), (96, 4, 4), (128, 12, 1), (256, 2, 1)]
)
def test_a_head_size_and_group(head_dim: int, n_head: int, n_head_kv: int, tmp_path: Path) -> None:
    family = FAMILIES["llama"].with_(head_dim=head_dim, n_head=n_head, n_head_kv=n_head_kv, types=PLAIN)
    path = write(tmp_path / "m.gguf", family)
    options = {"n_ctx": 20, "pinned": 4, "overflow": "slide"}
    assert compare(path, [14, 1, 1], 32, **options) < CLOSE
    assert compare_int8(path, 33, **options) < CLOSE


@pytest.mark.parametrize("name", ["llama", "qwen2moe"])
def test_gate_and_up_of_different_types(name: str, tmp_path: Path) -> None:
    types = {"default": "Q8_0", "ffn_up.weight": "F16", "ffn_up_exps.weight": "Q4_0"}
    types |= {"ffn_up_shexp.weight": "F16", "ffn_gate_inp.weight": "F32"}
    path = write(tmp_path / "m.gguf", FAMILIES[name].with_(head_dim=64, types=types))
    assert compare(path, [3, 12, 1], 16) < CLOSE


def test_a_plan_looks_at_the_memory_of_the_gpu(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", FAMILIES["llama"].with_(head_dim=64))
    open_model(path, "cuda").close()
    with ringlm.Model(path, device="cuda") as model:
        before = model.plan(32).memory_nbytes
        with model.session(n_ctx=32):
            assert model.plan(32).memory_nbytes <= before
            if "RINGLM_CUDA_LIBRARY" in os.environ:
                assert model.plan(32).memory_nbytes < before <= 1 << 30  # of the executor
        assert model.plan(32).most_sessions > 0


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.5, "top_k": 20}])
def test_generated_tokens_are_those_drawn_from_all_logits(sampling: dict[str, Any], tmp_path: Path) -> None:
    """Although the logits do not leave the GPU."""
    path = write(tmp_path / "m.gguf", FAMILIES["llama"].with_(head_dim=64))
    open_model(path, "cuda").close()
    sampling = {"top_k": 0, "top_p": 0.9, "min_p": 0.01, "seed": 3} | sampling
    with ringlm.Model(path, device="cuda") as model:
        with model.session(n_ctx=32) as session:
            found = list(session.generate(TEXT[:9], max_tokens=12, stop_ids=(), **sampling))
        sampler, expected = _core.Sampler(model.n_vocab, **sampling), []
        with model.session(n_ctx=32) as session:
            logits = session.prefill(TEXT[:9])
            for _ in found:
                expected.append(sampler.sample(logits))
                logits = session.decode(expected[-1])
    assert found == expected and len(set(found)) > 1
