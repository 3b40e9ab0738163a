"""The CUDA backend on a GPU, end to end: `pytest -m gpu`. Elsewhere skipped, and counted as skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gpu_models
import numpy as np
import pytest
from gpu_models import CASES, Case, open_model, path_of, read, text_of
from ringlm import DeviceError, Model, _core
from ringlm.errors import NumericError

pytestmark = pytest.mark.gpu

N = 150  # tokens of a text, half of them prefilled
LLAMA = CASES["llama, Q4_0"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models are. Only where there is a GPU."""
    made = tmp_path_factory.mktemp("gpu")
    try:
        _, archs = _core.cuda_library()  # before a model is written
        if archs == "executor":
            pytest.skip(
                "no GPU to run on: on the executor these texts take an hour; test_cuda.py has short ones"
            )
        open_model(path_of(made, LLAMA), "cuda").close()
    except DeviceError as e:
        pytest.skip(f"no GPU to run on: {e}")
    return made


@pytest.fixture
def gpu(folder: Path) -> Iterator[Model]:
    with Model(path_of(folder, LLAMA), device="cuda") as model:
        yield model


def both(folder: Path, case: Case) -> tuple[Model, Model]:
    path, options = path_of(folder, case), {} if case.window is None else {"window": case.window}
    return open_model(path, "cpu", **options), open_model(path, "cuda", **options)


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_texts_are_those_of_the_cpu(folder: Path, name: str) -> None:
    case = CASES[name]
    cpu, gpu = both(folder, case)
    with cpu, gpu:
        ids = text_of(cpu, N)
        found = gpu_models.compare(read(cpu, ids, case.options, N // 2), read(gpu, ids, case.options, N // 2))
        assert found.met, found
        expected, rows = gpu_models.greedy(cpu, ids[:20], 64, case.options)
        parts = gpu_models.parting(expected, rows, gpu_models.greedy(gpu, ids[:20], 64, case.options)[0])
        assert parts.gap <= case.most_gap, parts


def test_graphs_change_no_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for graph in ("1", "0"):
        monkeypatch.setenv("RINGLM_CUDA_GRAPH", graph)
        with Model(path_of(folder, LLAMA), device="cuda") as model:
            found.append(read(model, text_of(model, N), LLAMA.options, N // 2))
    assert np.array_equal(*found)


def test_a_batch_equals_each_session_alone(gpu: Model) -> None:
    ids = text_of(gpu, 40)
    alone, together = ([gpu.session(n_ctx=64, kv=kv) for kv in ("int8", "f16", "int8")] for _ in range(2))
    for i, (a, b) in enumerate(zip(alone, together, strict=True)):
        for session in (a, b):
            session.prefill(ids[: 7 * i + 2])
    for token in ids.tolist()[-8:]:
        gpu.step(together, [token] * 3)
        expected = [session.decode(token) for session in alone]
    found = [session.decode(1) for session in together]
    expected = [session.decode(1) for session in alone]
    assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))
    for session in alone + together:
        session.close()


def test_sessions_are_forked_rewound_saved_and_go_on_on_the_cpu(
    folder: Path, gpu: Model, tmp_path: Path
) -> None:
    ids = text_of(gpu, 40)
    with gpu.session(**LLAMA.options) as session:
        session.prefill(ids[:30])
        session.save(tmp_path / "session")
        with session.fork() as fork, gpu.load_session(tmp_path / "session") as loaded:
            expected = session.decode(5)
            assert np.array_equal(fork.decode(5), expected)
            assert np.array_equal(loaded.decode(5), expected)
        session.rewind(1)
        assert np.array_equal(session.decode(5), expected)
    with open_model(path_of(folder, LLAMA), "cpu") as cpu, cpu.load_session(tmp_path / "session") as there:
        assert np.abs(there.decode(5) - expected).max() < 2e-2 * np.abs(expected).max()


def test_a_text_many_times_as_long_as_its_ring(gpu: Model) -> None:
    """In memory that does not grow, and as the CPU reads it."""
    ids = text_of(gpu, 1000)
    with (
        open_model(gpu.path, "cpu") as cpu,
        gpu.session(**LLAMA.options) as session,
        cpu.session(**LLAMA.options) as other,
    ):
        before = session.nbytes
        for at in range(0, 900, 100):
            session.prefill(ids[at : at + 100])
            other.prefill(ids[at : at + 100])
        found = np.stack([session.decode(t) for t in ids[900:].tolist()])
        expected = np.stack([other.decode(t) for t in ids[900:].tolist()])
        assert session.nbytes == before and session.stats.evicted == 1000 - 72
        assert gpu_models.compare(expected, found).met


def test_a_plan_is_what_a_session_takes(gpu: Model) -> None:
    with gpu.session(n_ctx=128, kv="int8") as session:
        assert gpu.plan(n_ctx=128, kv="int8").session_nbytes == session.nbytes


def test_a_number_that_is_not_finite_undoes_its_step(folder: Path) -> None:
    family = LLAMA.family
    path = folder / "infinite.gguf"
    from random_family import tensors, write

    norm = tensors(family)["output_norm.weight"]
    norm[3] = np.inf
    write(path, family, weights={"output_norm.weight": norm})
    with Model(path, device="cuda") as model, model.session(n_ctx=32) as session:
        with pytest.raises(NumericError):
            session.prefill(text_of(model, 9))
        assert session.position == 0
