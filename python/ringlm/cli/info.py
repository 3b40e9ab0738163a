"""``ringlm info``."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from typing import Annotated, Any

import typer

from . import options as opt
from .app import app
from .info_device import device_lines
from .progress import PullView


@app.command("info")
def info_command(
    name: opt.ModelName = opt.DEFAULT_MODEL,
    device: Annotated[
        bool,
        typer.Option("--device", help="Show this machine's GPUs instead, and what the CUDA backend lacks."),
    ] = False,
    as_json: opt.Json = False,
) -> None:
    """Show what a model is: sizes, heads, context, RoPE, types, tokens, bytes of K/V.

    Works on every GGUF file, and says so when ringlm cannot run it."""
    record = _of_this_machine() if device else _of_model(name)
    if as_json:
        typer.echo(json.dumps(record, indent=2))
        return
    for label, value in device_lines(record) if device else _lines(record):
        if value:
            typer.echo(_entry(label, visible(value)))


def _of_model(name: str) -> dict[str, Any]:
    from ringlm import hub
    from ringlm.info import describe

    with PullView() as progress:
        path = hub.resolve(name, progress=progress)
    return describe(path)


def _of_this_machine() -> dict[str, Any]:
    from ringlm.device import describe_devices

    return describe_devices()


def _entry(label: str, value: str) -> str:
    """Label and value in two columns, wrapped to the terminal; a pipe gets whole lines however long."""
    head = label.ljust(15)
    if not sys.stdout.isatty():
        return head + value
    width = max(shutil.get_terminal_size().columns, 40)
    return textwrap.fill(
        value, width, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    )


def _lines(r: dict[str, Any]) -> list[tuple[str, str]]:
    files = f", {r['files']} files" if r["files"] > 1 else ""
    return [
        ("file", r["path"]),
        ("size", f"{_bytes(r['file_bytes'])}{files}, GGUF version {r['gguf_version']}"),
        ("name", r["name"] or ""),
        ("licence", r["licence"] or ""),
        ("architecture", r["architecture"] or "not given"),
        ("runs", _runs(r)),
        ("parameters", _count(r["parameters"])),
        *_shape_lines(r),
        *_type_lines(r["quantization"]),
        *_token_lines(r["tokens"]),
        ("template", ", ".join(r["chat_templates"]) or "none"),
    ]


def _runs(r: dict[str, Any]) -> str:
    if not r["supported"]:
        return f"no: {r['reason']}"
    slow = [t["type"] for t in r["quantization"] if not t["fast"]]
    return "yes" + (f", but without a fast kernel: {', '.join(slow)}" if slow else "")


def _shape_lines(r: dict[str, Any]) -> list[tuple[str, str]]:
    rope, n_ctx = r["rope"], r["n_ctx_default"]
    experts = f", {r['experts']} experts" if r["experts"] else ""
    lines = []
    if r["n_layer"] is not None:
        lines.append(
            (
                "layers",
                f"{r['n_layer']}, width {_some(r['n_embd'])}, feed-forward {_some(r['n_ff'])}{experts}",
            )
        )
    if r["n_head"] is not None:
        lines.append(
            (
                "heads",
                f"{_some(r['n_head'])} query, {_some(r['n_head_kv'])} KV, group {_some(r['group'])}, "
                f"{_some(r['head_dim'])} wide",
            )
        )
    if r["n_ctx_train"] is not None:
        window = f", sliding window {_some(r['sliding_window'])}" if r["sliding_window"] else ""
        lines.append(("context", f"{r['n_ctx_train']} trained, {n_ctx} by default{window}"))
    if rope["dims"] is not None:
        factor = f" by {_some(rope['factor'])}" if rope["factor"] is not None else ""
        scaling = "" if rope["scaling"] == "none" else f", scaling {rope['scaling']}{factor}"
        freqs = ", frequency factors" if rope["frequency_factors"] else ""
        dims = f"{_some(rope['dims'])} of {_some(r['head_dim'])} dims"
        lines.append(("RoPE", f"base {_some(rope['base'])}, {dims}{scaling}{freqs}"))
    if r["kv_bytes_per_token"] is not None:
        per = r["kv_bytes_per_token"]
        lines.append(("K/V per token", ", ".join(f"{n:,} bytes in {name}" for name, n in per.items())))
    if r["kv_bytes"] is not None:
        at = ", ".join(f"{_bytes(n)} in {name}" for name, n in r["kv_bytes"].items())
        lines.append(("K/V in all", f"{at}, for {n_ctx} tokens"))
    return lines


def _type_lines(types: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [
        (
            "" if i else "types",
            f"{t['type']}: {_plural(t['tensors'], 'tensor')}, {_bytes(t['bytes'])}, {t['share']:.1%}",
        )
        for i, t in enumerate(types)
    ] or [("types", "none: the file has no tensors")]


def _token_lines(tokens: dict[str, Any] | None) -> list[tuple[str, str]]:
    if tokens is None:
        return [("vocabulary", "none")]
    kind = tokens["model"] + (f" ({tokens['pre']})" if tokens["pre"] else "")
    lines = [("vocabulary", f"{tokens['n_vocab']} tokens, {kind}")]
    if tokens["reason"]:
        return [*lines, ("", f"not readable: {tokens['reason']}")]
    added = [name for name in ("bos", "eos") if tokens[f"add_{name}"]]

    def shown(token: dict[str, Any] | None) -> str:
        return "none" if token is None else f"{token['id']} {token['text']}"

    return [
        *lines,
        (
            "BOS, EOS",
            f"{shown(tokens['bos'])}, {shown(tokens['eos'])}; added: {' and '.join(added) or 'none'}",
        ),
        ("ends", ", ".join(shown(token) for token in tokens["eog"]) or "none"),
    ]


def visible(text: str) -> str:
    """Control characters of a hostile file do not reach the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _some(value: Any) -> str:
    """A number, or the different ones of a list that has one for each layer."""
    if isinstance(value, list):
        return "/".join(str(v) for v in sorted(set(value))) + " by layer"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else f"{value:g}"
    return "?" if value is None else str(value)


def _plural(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")


def _bytes(n: int) -> str:
    from ringlm.hub import format_bytes

    return format_bytes(n)


def _count(n: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if n >= size:
            return f"{n / size:.4g} {unit} ({n:,})"
    return str(n)
