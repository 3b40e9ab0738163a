"""``ringlm info --device`` in words."""

from __future__ import annotations

from typing import Any


def device_lines(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Labels and values of ``ringlm.device.describe_devices``."""
    from ringlm.hub import format_bytes

    missing, driver, library = record["missing"], record["driver"], record["library"]
    lines = []
    if library:
        archs = ", ".join(f"sm_{arch}" for arch in library["archs"])
        lines.append(("library", f"{library['path']}, for {archs + ' and newer' if archs else 'the host'}"))
    if record["package"]:
        lines.append(("package", f"cuda-bindings {record['package']}"))
    if driver:
        version = f"{driver['version']}, for " if driver["version"] else ""
        lines.append(("driver", f"{version}CUDA {driver['cuda']}"))
    lines += [("GPU" if what == "gpu" else what, f"missing: {why}") for what, why in missing.items()]
    order = ("library", "package", "driver", "GPU")
    lines.sort(key=lambda line: order.index(line[0]))
    for gpu in record["gpus"]:
        arch = "sm_" + gpu["compute_capability"].replace(".", "")
        no_code = ", for which the library has no code" if gpu["has_code"] is False else ""
        free = gpu["memory_free_bytes"]
        total = format_bytes(gpu["memory_bytes"]) + (", shared with the CPU" if gpu["integrated"] else "")
        lines += [
            (
                f"GPU {gpu['index']}",
                f"{gpu['name']}, {arch}{no_code}, {gpu['multiprocessors']} multiprocessors",
            ),
            ("  memory", f"{'?' if free is None else format_bytes(free)} free of {total}"),
            ("  clocks", f"{_clock('', gpu)}; memory {_clock('memory_', gpu)}"),
            ("  bandwidth", _bandwidth(gpu)),
            ("  power", _power(gpu)),
        ]
    return lines


def _clock(kind: str, gpu: dict[str, Any]) -> str:
    most, now = gpu[f"{kind}clock_mhz"], gpu[f"{kind}clock_now_mhz"]
    at_most = "not known" if most is None else f"at most {most:,} MHz"
    return at_most + ("" if now is None else f", now {now:,} MHz")


def _bandwidth(gpu: dict[str, Any]) -> str:
    bits, clock, bandwidth = gpu["memory_bus_bits"], gpu["memory_clock_mhz"], gpu["memory_bandwidth"]
    if bandwidth is None:
        return f"not known: {bits} bits, at a clock that only root may read here"
    return f"{bandwidth / 1e9:.1f} GB/s: {bits} bits, twice in each of {clock:,} MHz"


def _power(gpu: dict[str, Any]) -> str:
    if gpu["integrated"]:
        return (
            f"mode {gpu['power_mode']}" if gpu["power_mode"] else "mode not known: nvpmodel -q does not say"
        )
    now, limit = gpu["power_watts"], gpu["power_limit_watts"]
    if now is None and limit is None:
        return "not known: the driver's management library does not say"
    return f"{'?' if now is None else f'{now:.0f}'} W of {'?' if limit is None else f'{limit:.0f}'} W allowed"
