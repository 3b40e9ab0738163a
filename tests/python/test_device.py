"""device="cuda" without a GPU, and ringlm info --device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
from fake_cuda import OLD, ORIN, T4, Driver, Nvml
from random_llama import Shape, write_llama
from ringlm import DeviceError, InvalidArgument, Model, _core, device
from ringlm.cli import main

LIBRARY = "/somewhere/libringlm_cuda.so"
Lines = dict[str, str]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "cuda_library", lambda: (LIBRARY, "75 86"))


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise DeviceError("built without it")

    monkeypatch.setattr(_core, "cuda_library", refuse)


@pytest.fixture
def info(capsys: pytest.CaptureFixture[str]) -> Callable[[], tuple[dict[str, Any], Lines]]:
    """What `ringlm info --device` says as JSON and in lines, by their label."""

    def run() -> tuple[dict[str, Any], Lines]:
        assert main(["info", "--device", "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert main(["info", "--device"]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return record, {line[:15].strip(): line[15:] for line in out.splitlines()}

    return run


Info = Callable[[], tuple[dict[str, Any], Lines]]


# ---- what is missing ---------------------------------------------------------------------------------------


def test_nothing_is_there(info: Info, monkeypatch: pytest.MonkeyPatch, no_library: None) -> None:
    fake_cuda.install(monkeypatch, None, None)
    record, lines = info()
    assert record["gpus"] == [] and record["package"] is record["driver"] is record["library"] is None
    assert set(record["missing"]) == {"package", "library"}
    assert list(lines) == ["library", "package"]
    assert lines["library"] == "missing: built without it"
    assert "pip install '.[cuda]'" in lines["package"]


def test_no_driver(info: Info, monkeypatch: pytest.MonkeyPatch, library: None) -> None:
    fake_cuda.install(monkeypatch, Driver([], present=False), None)
    record, lines = info()
    assert record["library"] == {"path": LIBRARY, "archs": [75, 86]}
    assert set(record["missing"]) == {"driver"}
    assert lines == {
        "library": f"{LIBRARY}, for sm_75, sm_86 and newer",
        "package": "cuda-bindings 13.0.1",
        "driver": 'missing: there is no NVIDIA driver: "cuda" is an NVIDIA driver library and can only be '
        "found via system search.",
    }


@pytest.mark.parametrize("init", [fake_cuda.Result.CUDA_SUCCESS, fake_cuda.Result.CUDA_ERROR_NO_DEVICE])
def test_no_gpu(info: Info, monkeypatch: pytest.MonkeyPatch, library: None, init: Any) -> None:
    fake_cuda.install(monkeypatch, Driver([], init=init), None)
    record, lines = info()
    assert set(record["missing"]) == {"gpu"} and record["gpus"] == []
    assert lines["GPU"].startswith("missing: the driver sees none") and "CUDA_VISIBLE_DEVICES" in lines["GPU"]


def test_a_driver_that_refuses(info: Info, monkeypatch: pytest.MonkeyPatch, library: None) -> None:
    fake_cuda.install(monkeypatch, Driver([T4], init=fake_cuda.Result.CUDA_ERROR_OUT_OF_MEMORY), None)
    _, lines = info()
    assert lines["driver"] == "missing: it refuses: CUDA_ERROR_OUT_OF_MEMORY"


def test_a_gpu_that_refuses(info: Info, monkeypatch: pytest.MonkeyPatch, library: None) -> None:
    driver = Driver([T4])
    monkeypatch.setattr(driver, "cuDeviceGet", lambda index: (fake_cuda.Result.CUDA_ERROR_OUT_OF_MEMORY, 0))
    fake_cuda.install(monkeypatch, driver, None)
    record, lines = info()
    assert record["gpus"] == [] and lines["GPU"] == "missing: it refuses: CUDA_ERROR_OUT_OF_MEMORY"


# ---- GPUs --------------------------------------------------------------------------------------------------


def test_two_gpus(info: Info, monkeypatch: pytest.MonkeyPatch, library: None) -> None:
    driver = Driver([T4, OLD])
    fake_cuda.install(monkeypatch, driver, Nvml(driver.gpus))
    record, _ = info()
    assert record["missing"] == {} and record["driver"] == {"cuda": "12.2", "version": "535.104.05"}
    assert record["gpus"][0] == {
        "index": 0,
        "name": "Tesla T4",
        "compute_capability": "7.5",
        "has_code": True,
        "multiprocessors": 40,
        "integrated": False,
        "memory_bytes": T4.total,
        "memory_free_bytes": T4.free,
        "clock_mhz": 1590,
        "clock_now_mhz": 300,
        "memory_clock_mhz": 5001,
        "memory_clock_now_mhz": 405,
        "memory_bus_bits": 256,
        "memory_bandwidth": 320_064_000_000,  # its data sheet: 320 GB/s
        "power_mode": None,
        "power_watts": 9.32,
        "power_limit_watts": 70.0,
    }
    old = record["gpus"][1]
    assert (old["has_code"], old["memory_bytes"], old["memory_free_bytes"]) == (False, OLD.total, None)
    assert (old["power_watts"], old["power_limit_watts"]) == (None, None)
    assert (driver.contexts, driver.current) == ([], [])


def test_two_gpus_in_words(monkeypatch: pytest.MonkeyPatch, library: None, capsys: Any) -> None:
    fake_cuda.install(monkeypatch, Driver([T4, OLD]), Nvml([T4, OLD]))
    assert main(["info", "--device"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"library        {LIBRARY}, for sm_75, sm_86 and newer",
        "package        cuda-bindings 13.0.1",
        "driver         535.104.05, for CUDA 12.2",
        "GPU 0          Tesla T4, sm_75, 40 multiprocessors",
        "  memory       15.5 GB free of 15.6 GB",
        "  clocks       at most 1,590 MHz, now 300 MHz; memory at most 5,001 MHz, now 405 MHz",
        "  bandwidth    320.1 GB/s: 256 bits, twice in each of 5,001 MHz",
        "  power        9 W of 70 W allowed",
        "GPU 1          GeForce GTX 1080, sm_61, for which the library has no code, 20 multiprocessors",
        "  memory       ? free of 8.59 GB",
        "  clocks       at most 1,733 MHz, now 300 MHz; memory at most 5,005 MHz, now 405 MHz",
        "  bandwidth    320.3 GB/s: 256 bits, twice in each of 5,005 MHz",
        "  power        not known: the driver's management library does not say",
    ]


@pytest.fixture
def jetson(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its files and its nvpmodel; returns the folder of the memory's clock."""
    memory = tmp_path / "emc"
    monkeypatch.setattr(device, "_MEMORY_CLOCK", memory)
    monkeypatch.setattr(device, "_GPU_CLOCKS", tmp_path / "devfreq")
    gpu = tmp_path / "devfreq" / "17000000.ga10b"
    gpu.mkdir(parents=True)
    (gpu / "cur_freq").write_text("306000000\n")
    (tmp_path / "nvpmodel").write_text("#!/bin/sh\n[ $1 = -q ] && printf 'NV Power Mode: MODE_30W\\n2\\n'\n")
    (tmp_path / "nvpmodel").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return memory


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_jetson(info: Info, monkeypatch: pytest.MonkeyPatch, library: None, jetson: Path) -> None:
    jetson.mkdir()
    (jetson / "max_rate").write_text("3199000000\n")
    (jetson / "rate").write_text("2133000000\n")
    fake_cuda.install(monkeypatch, Driver([ORIN]), None)
    record, lines = info()
    (gpu,) = record["gpus"]
    assert record["driver"] == {"cuda": "12.2", "version": None}
    assert gpu["integrated"] and gpu["has_code"]  # code of sm_86 runs on sm_87
    assert gpu["memory_bandwidth"] == 204_736_000_000  # its data sheet: 204.8 GB/s
    assert lines["driver"] == "CUDA 12.2"
    assert lines["memory"] == "21.5 GB free of 34.4 GB, shared with the CPU"
    assert lines["clocks"] == "at most 1,300 MHz, now 306 MHz; memory at most 3,199 MHz, now 2,133 MHz"
    assert lines["bandwidth"] == "204.7 GB/s: 256 bits, twice in each of 3,199 MHz"
    assert lines["power"] == "mode MODE_30W"


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_jetson_without_root(
    info: Info, monkeypatch: pytest.MonkeyPatch, library: None, jetson: Path
) -> None:
    (jetson.parent / "nvpmodel").write_text("#!/bin/sh\nexit 1\n")
    fake_cuda.install(monkeypatch, Driver([ORIN]), None)
    record, lines = info()
    assert record["gpus"][0]["memory_bandwidth"] is record["gpus"][0]["power_mode"] is None
    assert lines["clocks"] == "at most 1,300 MHz, now 306 MHz; memory not known"
    assert "only root" in lines["bandwidth"] and "not known" in lines["power"]


@pytest.mark.parametrize(
    ("arch", "runs"), [(61, False), (70, False), (75, True), (80, False), (86, True), (87, True), (120, True)]
)
def test_which_gpus_have_code(arch: int, runs: bool) -> None:
    assert device._has_code([75, 86], arch) is runs


def test_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the extra `cuda`, where it is there: it has the functions that are called."""
    driver = pytest.importorskip("cuda.bindings.driver")
    called = {name for name in vars(Driver) if name.startswith("cu")}
    assert called <= set(dir(driver))
    for attribute in fake_cuda.Attribute:
        assert getattr(driver.CUdevice_attribute, attribute.name).value == attribute.value
    assert driver.CUresult.CUDA_ERROR_NO_DEVICE.value == fake_cuda.Result.CUDA_ERROR_NO_DEVICE
    device.describe_devices()


# ---- Model -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    write_llama(path, Shape())
    return path


def run_on_cuda(model: Path, library: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: a library that was once loaded stays."""
    code = "import sys; from ringlm.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, "run", model, "-p", "x", "--device", "cuda"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"RINGLM_CUDA_LIBRARY": library},
    )


def test_a_library_that_is_not_there(model: Path) -> None:
    done = run_on_cuda(model, "/nowhere/libringlm_cuda.so")
    assert (done.returncode, done.stdout) == (1, "")
    assert "RINGLM_CUDA_LIBRARY is '/nowhere/libringlm_cuda.so'" in done.stderr


def test_a_build_without_cuda(model: Path) -> None:
    done = run_on_cuda(model, "")
    if "built without CUDA" not in done.stderr:
        assert Path(_core.cuda_library()[0]).exists()
        pytest.skip("this ringlm was built with CUDA")
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.count("\n") == 1
    assert str(Path(_core.__file__).parent) in done.stderr
    assert "RINGLM_CUDA=ON" in done.stderr and "device='cpu'" in done.stderr


def test_devices_that_are_none(model: Path) -> None:
    with pytest.raises(InvalidArgument, match="device is 'tpu'; expected 'cpu' or 'cuda'"):
        Model(model, device="tpu")
    with pytest.raises(InvalidArgument, match="backend 'reference' computes on the CPU"):
        Model(model, device="cuda", backend="reference")
