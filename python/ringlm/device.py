"""The GPUs of this machine, and what of the CUDA backend's needs is there."""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringlm.errors import DeviceError

__all__ = ["describe_devices"]

# Of Tegra: CUDA gives the GPU's clock as the memory's there. In Hz; only root may read the first.
_MEMORY_CLOCK = Path("/sys/kernel/debug/bpmp/debug/clk/emc")
_GPU_CLOCKS = Path("/sys/class/devfreq")


class _Missing(Exception):
    """What is not there, and what to do."""


def describe_devices() -> dict[str, Any]:
    """This machine's GPUs as JSON-like data; what cannot be found out is None.

    ``package``, ``driver`` and ``library`` (libringlm_cuda.so) are what was found of each; for each that was
    not, and for ``gpu`` where there is none, ``missing`` has a line. Memory is in bytes, bandwidth in bytes a
    second: bits of the bus / 8, times the clock, times two transfers a clock. The clocks are the highest, and
    that of now.
    """
    record: dict[str, Any] = {"package": None, "driver": None, "library": None, "gpus": [], "missing": {}}
    try:
        record["library"] = _library()
    except DeviceError as e:
        record["missing"]["library"] = str(e)
    what = "package"
    try:
        cuda, record["package"] = _package()
        what = "driver"
        _call(cuda.cuInit, 0)
        version = _call(cuda.cuDriverGetVersion)
        nvml = _nvml()
        record["driver"] = {
            "cuda": f"{version // 1000}.{version % 1000 // 10}",
            "version": _asked(nvml, "system_get_driver_version"),
        }
        what = "gpu"
        n = _call(cuda.cuDeviceGetCount)
        if n == 0:
            raise _Missing(_NO_GPU)
        archs = record["library"] and record["library"]["archs"]
        record["gpus"] = [_gpu(cuda, nvml, i, archs) for i in range(n)]
    except _Refused as e:
        if e.name == "CUDA_ERROR_NO_DEVICE":  # of cuInit
            record["missing"]["gpu"] = _NO_GPU
        else:
            record["missing"][what] = f"it refuses: {e.name}"
    except _Missing as e:
        record["missing"][what] = str(e)
    return record


_NO_GPU = "the driver sees none: look at nvidia-smi, CUDA_VISIBLE_DEVICES and the container's devices"


class _Refused(Exception):
    """A call of the driver failed with the error of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _call(function: Callable[..., Any], *args: Any) -> Any:
    """What a function of the driver returns behind its error code."""
    try:
        error, *values = function(*args)
    except RuntimeError as e:  # the bindings did not find libcuda, or it has no such function
        raise _Missing(f"there is no NVIDIA driver: {' '.join(str(e).split())}") from None
    if error.value != 0:
        raise _Refused(error.name)
    return values[0] if len(values) == 1 else values


def _library() -> dict[str, Any]:
    import ringlm._core as core

    path, archs = core.cuda_library()
    return {"path": path, "archs": [int(arch) for arch in archs.split() if arch.isdigit()]}


def _package() -> tuple[Any, str]:
    try:
        return importlib.import_module("cuda.bindings.driver"), importlib.import_module(
            "cuda.bindings"
        ).__version__
    except ImportError:
        raise _Missing(
            "cuda-bindings is not installed: pip install '.[cuda]'; GPUs are not looked at"
        ) from None


def _nvml() -> Any:
    """NVIDIA's management library, or None: Jetsons and old bindings have none, or half of one."""
    try:
        nvml = importlib.import_module("cuda.bindings.nvml")
        nvml.init_v2()
    except Exception:  # of classes that belong to that module
        return None
    return nvml


def _asked(nvml: Any, function: str, *args: Any) -> Any:
    """None where the management library does not answer: then the device is shown without it."""
    try:
        return getattr(nvml, function)(*args)
    except Exception:
        return None


def _gpu(cuda: Any, nvml: Any, index: int, archs: list[int] | None) -> dict[str, Any]:
    device = _call(cuda.cuDeviceGet, index)

    def attribute(name: str) -> int:
        return int(
            _call(
                cuda.cuDeviceGetAttribute,
                getattr(cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"),
                device,
            )
        )

    major, minor = attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")
    integrated = bool(attribute("INTEGRATED"))
    free, total = _memory(cuda, device)
    clocks: dict[str, int | None] = {
        "clock_mhz": attribute("CLOCK_RATE") // 1000,
        "memory_clock_mhz": attribute("MEMORY_CLOCK_RATE") // 1000,
    }
    if integrated:
        clocks |= {
            "memory_clock_mhz": _mhz(_MEMORY_CLOCK / "max_rate"),
            "clock_now_mhz": _mhz(*_GPU_CLOCKS.glob("*.g*/cur_freq")),
            "memory_clock_now_mhz": _mhz(_MEMORY_CLOCK / "rate"),
        }
        power: dict[str, Any] = {"power_mode": _power_mode(), "power_watts": None, "power_limit_watts": None}
    else:
        bus = _call(cuda.cuDeviceGetPCIBusId, 64, device).decode("ascii", "replace").rstrip("\0")
        handle = _asked(nvml, "device_get_handle_by_pci_bus_id_v2", bus)
        clocks |= {
            "clock_now_mhz": _asked(nvml, "device_get_clock_info", handle, 1),  # NVML_CLOCK_SM
            "memory_clock_now_mhz": _asked(nvml, "device_get_clock_info", handle, 2),  # NVML_CLOCK_MEM
        }
        power = {
            "power_mode": None,
            "power_watts": _watts(_asked(nvml, "device_get_power_usage", handle)),
            "power_limit_watts": _watts(_asked(nvml, "device_get_enforced_power_limit", handle)),
        }
    bits, clock = attribute("GLOBAL_MEMORY_BUS_WIDTH"), clocks["memory_clock_mhz"]
    return {
        "index": index,
        "name": _call(cuda.cuDeviceGetName, 256, device).decode("utf-8", "replace").rstrip("\0"),
        "compute_capability": f"{major}.{minor}",
        "has_code": None if archs is None else _has_code(archs, 10 * major + minor),
        "multiprocessors": attribute("MULTIPROCESSOR_COUNT"),
        "integrated": integrated,
        "memory_bytes": total,
        "memory_free_bytes": free,
        **clocks,
        "memory_bus_bits": bits,
        "memory_bandwidth": bits // 8 * clock * 2_000_000 if clock else None,
        **power,
    }


def _has_code(archs: list[int], arch: int) -> bool:
    """Whether the library runs there: code runs on later GPUs of its generation, PTX of its last one on all
    that are newer."""
    return arch >= max(archs, default=0) or any(a // 10 == arch // 10 and a <= arch for a in archs)


def _memory(cuda: Any, device: Any) -> tuple[int | None, int]:
    """Free and total bytes. What is free is only told inside of a context, which takes some itself."""
    try:
        context = _call(cuda.cuDevicePrimaryCtxRetain, device)
    except _Refused:
        return None, int(_call(cuda.cuDeviceTotalMem, device))
    try:
        _call(cuda.cuCtxPushCurrent, context)
        free, total = _call(cuda.cuMemGetInfo)
        _call(cuda.cuCtxPopCurrent)
    finally:
        _call(cuda.cuDevicePrimaryCtxRelease, device)
    return int(free), int(total)


def _mhz(*files: Path) -> int | None:
    """From the first file, which has Hz."""
    try:
        return int(files[0].read_text(encoding="ascii")) // 1_000_000
    except (IndexError, OSError, ValueError):
        return None


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _power_mode() -> str | None:
    """Of a Jetson: MAXN, 15W and so on."""
    try:
        done = subprocess.run(
            ["nvpmodel", "-q"], stdin=subprocess.DEVNULL, capture_output=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"NV Power Mode:\s*(\S+)", done.stdout.decode("utf-8", "replace"))
    return found and found[1]
