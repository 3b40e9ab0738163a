"""A module as `cuda.bindings.driver` is, with the GPUs of a test, and one as `cuda.bindings.nvml` is."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import IntEnum
from types import ModuleType
from typing import Any

import pytest

Result = IntEnum("Result", {"CUDA_SUCCESS": 0, "CUDA_ERROR_OUT_OF_MEMORY": 2, "CUDA_ERROR_NO_DEVICE": 100})
# Numbers of cuda.h.
Attribute = IntEnum(
    "Attribute",
    {
        f"CU_DEVICE_ATTRIBUTE_{name}": number
        for name, number in {
            "CLOCK_RATE": 13,
            "MULTIPROCESSOR_COUNT": 16,
            "INTEGRATED": 18,
            "MEMORY_CLOCK_RATE": 36,
            "GLOBAL_MEMORY_BUS_WIDTH": 37,
            "COMPUTE_CAPABILITY_MAJOR": 75,
            "COMPUTE_CAPABILITY_MINOR": 76,
        }.items()
    },
)


@dataclass
class Gpu:
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    clock_khz: int
    memory_clock_khz: int
    bus_bits: int
    total: int
    free: int | None  # None: no context can be made
    integrated: bool = False
    milliwatts: tuple[int, int] | None = None  # now, limit; None: the management library does not know it

    def attributes(self) -> dict[int, int]:
        values = (
            self.clock_khz,
            self.multiprocessors,
            int(self.integrated),
            self.memory_clock_khz,
            self.bus_bits,
            *self.capability,
        )
        return dict(zip(Attribute, values, strict=True))


T4 = Gpu(
    "Tesla T4",
    (7, 5),
    40,
    1_590_000,
    5_001_000,
    256,
    15_642_329_088,
    15_500_000_000,
    milliwatts=(9_320, 70_000),
)
OLD = Gpu("GeForce GTX 1080", (6, 1), 20, 1_733_500, 5_005_000, 256, 8 << 30, None)
# CUDA gives the GPU's clock as the memory's there.
ORIN = Gpu("Orin", (8, 7), 16, 1_300_000, 1_300_000, 256, 32 << 30, 20 << 30, integrated=True)


class Driver(ModuleType):
    """`present` False: there is no libcuda."""

    CUdevice_attribute = Attribute

    def __init__(self, gpus: list[Gpu], present: bool = True, init: Any = Result.CUDA_SUCCESS) -> None:
        super().__init__("cuda.bindings.driver")
        self.gpus, self.present, self.init = gpus, present, init
        self.contexts: list[int] = []  # retained
        self.current: list[int] = []  # pushed

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        if not self.present:
            raise RuntimeError('"cuda" is an NVIDIA driver library\nand can only be found via system search.')
        return (self.init,)

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, 12020

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, len(self.gpus)

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, index

    def cuDeviceGetName(self, length: int, device: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, self.gpus[device].name.encode().ljust(length, b"\0")

    def cuDeviceGetPCIBusId(self, length: int, device: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, f"0000:{device:02x}:00.0".encode().ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, self.gpus[device].attributes()[attribute]

    def cuDeviceTotalMem(self, device: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, self.gpus[device].total

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        if self.gpus[device].free is None:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, None
        self.contexts.append(device)
        return Result.CUDA_SUCCESS, device

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[Any, ...]:
        self.contexts.remove(device)
        return (Result.CUDA_SUCCESS,)

    def cuCtxPushCurrent(self, context: int) -> tuple[Any, ...]:
        self.current.append(context)
        return (Result.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, self.current.pop()

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        gpu = self.gpus[self.current[-1]]
        return Result.CUDA_SUCCESS, gpu.free, gpu.total


class Nvml(ModuleType):
    def __init__(self, gpus: list[Gpu]) -> None:
        super().__init__("cuda.bindings.nvml")
        self.gpus = gpus

    def init_v2(self) -> None:
        pass

    def system_get_driver_version(self) -> str:
        return "535.104.05"

    def device_get_handle_by_pci_bus_id_v2(self, bus: str) -> int:
        return int(bus.split(":")[1], 16)

    def device_get_clock_info(self, handle: int, kind: int) -> int:
        return {1: 300, 2: 405}[kind]

    def device_get_power_usage(self, handle: int) -> int:
        return self._milliwatts(handle)[0]

    def device_get_enforced_power_limit(self, handle: int) -> int:
        return self._milliwatts(handle)[1]

    def _milliwatts(self, handle: int) -> tuple[int, int]:
        watts = self.gpus[handle].milliwatts
        if watts is None:
            raise ValueError("not supported")
        return watts


def install(monkeypatch: pytest.MonkeyPatch, driver: ModuleType | None, nvml: ModuleType | None) -> None:
    """As if cuda-bindings had these modules; without a driver module it is not installed."""
    bindings = ModuleType("cuda.bindings")
    bindings.__version__ = "13.0.1"  # type: ignore[attr-defined]
    modules = {"cuda": ModuleType("cuda"), "cuda.bindings": bindings}
    if driver is None:
        modules = dict.fromkeys(modules)  # type: ignore[arg-type]
    for name, module in {**modules, "cuda.bindings.driver": driver, "cuda.bindings.nvml": nvml}.items():
        monkeypatch.setitem(sys.modules, name, module)  # None: importing it fails
