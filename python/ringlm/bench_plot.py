"""A chart of a benchmark (extra ``plot``)."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from ringlm.errors import InvalidArgument, StateError

if TYPE_CHECKING:
    from ringlm.bench import Report, Result

__all__ = ["new_figure", "plot"]


def new_figure(path: str | os.PathLike[str], **options: Any) -> Any:
    """A matplotlib Figure that can be written to ``path``. Raises StateError where matplotlib is not
    installed, InvalidArgument for an ending that it does not know."""
    try:
        figure = importlib.import_module("matplotlib.figure").Figure(**options)
    except ImportError as e:
        raise StateError(f"a chart needs matplotlib: pip install 'ringlm[plot]' ({e})") from None
    known, ending = figure.canvas.get_supported_filetypes(), os.path.splitext(path)[1]
    if ending[1:].lower() not in known:
        raise InvalidArgument(
            f"{os.fspath(path)!r} ends in {ending!r}; a chart is written as .png, .svg or .pdf (or "
            + ", ".join(f".{name}" for name in known if name not in ("png", "svg", "pdf"))
            + ")"
        )
    return figure


def plot(report: Report, path: str | os.PathLike[str]) -> None:
    """Writes a chart of achieved bandwidth against the limit; the ending of ``path`` says in which format.

    Raises StateError, InvalidArgument, OSError.
    """
    decode = [r for r in report.results if r.kind == "decode"]
    prefill = [r for r in report.results if r.kind == "prefill"]
    parts = [(kind, rows) for kind, rows in (("decode", decode), ("prefill", prefill)) if rows]
    heights = [len(rows) for _, rows in parts]
    figure = new_figure(
        path, figsize=(9, 1.9 + 0.42 * sum(heights) + 0.8 * (len(parts) - 1)), layout="constrained"
    )
    axes = figure.subplots(len(parts), 1, height_ratios=heights, squeeze=False)[:, 0]
    machine = report.machine
    figure.suptitle(os.path.basename(report.model), fontweight="bold", fontsize=12)
    figure.supxlabel(
        f"{machine.cpu}, {machine.cores} cores, {machine.isa}; ringlm {machine.ringlm}, {machine.date[:10]}",
        fontsize=8,
        color="0.35",
    )
    for axis, (kind, rows) in zip(axes, parts, strict=True):
        (_decode if kind == "decode" else _prefill)(axis, rows)
    figure.savefig(path, dpi=150)


def _decode(axis: Any, rows: list[Result]) -> None:
    """A bar of GB/s for each, in front of one that is the limit."""
    limits = [r.gbs / r.fraction_of_read_bandwidth for r in rows]
    places = range(len(rows))
    axis.barh(places, limits, 0.72, color="0.88")
    axis.barh(places, [r.gbs for r in rows], 0.72, color="#2a6fb0")
    for place, r in zip(places, rows, strict=True):
        text = f"{r.tokens_per_second:.0f} tokens/s, {r.fraction_of_read_bandwidth:.0%}"
        inside = r.fraction_of_read_bandwidth > 0.45
        axis.annotate(
            text,
            (r.gbs, place),
            xytext=(-6 if inside else 6, 0),
            textcoords="offset points",
            ha="right" if inside else "left",
            va="center",
            color="white" if inside else "0.1",
            fontsize=9,
        )
    axis.set_xlim(0, max(*limits, *(r.gbs for r in rows)) * 1.02)
    axis.set_xlabel("GB/s of weights and K/V; grey: what as many threads read from memory in the same run")
    axis.set_title("decode", loc="left", fontsize=10)
    _finish(axis, rows)


def _prefill(axis: Any, rows: list[Result]) -> None:
    axis.barh(range(len(rows)), [r.tokens_per_second for r in rows], 0.72, color="#3b8f5a")
    for place, r in enumerate(rows):
        axis.annotate(
            f"{r.tokens_per_second:,.0f}",
            (r.tokens_per_second, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axis.set_xlim(0, max(r.tokens_per_second for r in rows) * 1.12)
    axis.set_xlabel("tokens/s")
    axis.set_title("prefill", loc="left", fontsize=10)
    _finish(axis, rows)


def _finish(axis: Any, rows: list[Result]) -> None:
    labels = [f"{r.n} at depth {r.depth}, {r.kv}, {r.threads} thread" + "s" * (r.threads != 1) for r in rows]
    axis.set_yticks(range(len(rows)), labels, fontsize=9)
    axis.invert_yaxis()
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
