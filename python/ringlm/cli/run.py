"""``ringlm run``: continue raw text."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from . import options as opt
from .app import app

if TYPE_CHECKING:
    from ringlm.session import Session
    from ringlm.text import TextGeneration


@app.command("run")
def run_command(
    name: opt.ModelName = opt.DEFAULT_MODEL,
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", metavar="TEXT", help="Text to continue; -, or none: read stdin."),
    ] = None,
    max_tokens: opt.MaxTokens = None,
    temp: opt.Temperature = None,
    top_k: opt.TopK = opt.DEFAULTS.top_k,
    top_p: opt.TopP = opt.DEFAULTS.top_p,
    min_p: opt.MinP = opt.DEFAULTS.min_p,
    repeat_penalty: opt.RepeatPenalty = opt.DEFAULTS.repetition_penalty,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    n_ctx: opt.Context = None,
    threads: opt.Threads = None,
    kv: opt.Kv = "f16",
    pinned: opt.Pinned = 0,
    overflow: opt.Overflow = "error",
    window: opt.Window = None,
    rope: opt.Rope = None,
    chunk: opt.Chunk = 128,
    device: opt.Device = "cpu",
    backend: opt.Backend = None,
    as_json: opt.Json = False,
    verbose: opt.Verbose = False,
) -> None:
    """Continue a text. No chat template is applied: the model sees the prompt as it is.

    Of a prompt from stdin one newline at the end is dropped. Ctrl-C stops. With --overflow slide only -n,
    --stop or the model's own end do, and memory does not grow."""
    from ringlm.errors import InvalidArgument
    from ringlm.text import generate_text

    text = _prompt(prompt)
    sampling = opt.sampling(name, temp, top_k, top_p, min_p, repeat_penalty, seed)
    began = time.perf_counter()
    with opt.opened(name, threads, device, backend, window, rope) as model:
        ids = model.tokenizer.encode(text)
        if not ids:
            raise InvalidArgument("the prompt is empty, and the model has no BOS token to begin with")
        with model.session(n_ctx, opt.kv_types(kv), chunk, pinned=pinned, overflow=overflow) as session:
            if verbose:
                _say(f"{model.path}, opened in {time.perf_counter() - began:.2f} s")
                _say(
                    f"backend {model.backend}, {model.n_threads} threads, context {session.n_ctx}, "
                    f"K/V {session.kv_nbytes / 2**20:.1f} MiB"
                )
            pieces = generate_text(
                session,
                model.tokenizer,
                ids,
                stop=stop,
                max_tokens=max_tokens,
                continuation=True,
                sampling=sampling,
                keep_ids=as_json,
            )
            answer = _generate(pieces, echo=not as_json)
            stats = session.stats
            if as_json:
                record = {
                    "model": str(model.path),
                    "text": answer,
                    "tokens": pieces.ids,
                    "finish_reason": pieces.finish_reason,
                    "prompt_tokens": len(ids),
                    "generated_tokens": len(pieces.ids),
                    "prefill_seconds": stats.prefill_seconds,
                    "decode_seconds": stats.decode_seconds,
                    "seed": pieces.generation.seed,
                }
                typer.echo(json.dumps(record))
            if verbose:
                _say_timings(session, pieces)


def _generate(pieces: TextGeneration, echo: bool) -> str:
    """Writes the text to stdout as it comes, and a newline at its end; or returns it. Exit code 130 on
    Ctrl-C."""
    answer = ""
    try:
        for piece in pieces:
            if echo:
                opt.write(piece.text)
            else:
                answer += piece.text
    except KeyboardInterrupt:
        if echo:
            opt.write("\n")
        raise typer.Exit(130) from None
    if echo:
        opt.write("\n")
    return answer


def _prompt(given: str | None) -> str:
    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        raise typer.BadParameter("there is no prompt: give -p TEXT, or pipe one in", param_hint="-p")
    return opt.read_text(None).removesuffix("\n")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def _say_timings(session: Session, pieces: TextGeneration) -> None:
    stats = session.stats
    for what, n, seconds in (
        ("prefill", stats.prefill_tokens, stats.prefill_seconds),
        ("decode", stats.decode_tokens, stats.decode_seconds),
    ):
        rate = f", {n / seconds:.1f} tokens/s" if n and seconds else ""
        _say(f"{what}: {n} tokens in {seconds:.2f} s{rate}")
    _say(
        f"context: {stats.visible} of {session.n_ctx} tokens visible, {session.pinned} pinned, "
        f"{stats.evicted} evicted; {stats.slots} slots"
    )
    _say(f"seed {pieces.generation.seed}, finished by {pieces.finish_reason}")
