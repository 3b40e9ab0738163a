"""Options and arguments that commands share, and what they mean."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringlm.errors import InvalidArgument
from ringlm.sampling import Sampling

from .progress import PullView

if TYPE_CHECKING:
    from ringlm.model import Model

DEFAULT_MODEL = "smollm2-135m"
DEFAULTS = Sampling()
_GENERATION, _RUNTIME = "Generation", "Runtime"

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Path of a GGUF file, a name of 'ringlm list', or hf:owner/repo/file.gguf."
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "-n", "--max-tokens", metavar="N", min=1, help="Most tokens to generate.", show_default="context"
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temp",
        metavar="X",
        min=0.0,
        help="Temperature; 0 takes the most probable token.",
        show_default=f"what suits the model, or {DEFAULTS.temperature}",
    ),
]
TopK = Annotated[
    int, typer.Option("--top-k", metavar="K", min=0, help="Draw from the K most probable; 0: all.")
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p", metavar="P", min=0.0, max=1.0, help="Draw from the most probable that make up P."
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p", metavar="P", min=0.0, max=1.0, help="Drop what is less probable than P times the best."
    ),
]
RepeatPenalty = Annotated[
    float, typer.Option("--repeat-penalty", metavar="X", help="Above 1: recent tokens become less probable.")
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", metavar="N", min=0, max=2**64 - 1, help="Same seed, same text.", show_default="random"
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="End before this text; may be given several times."),
]
Context = Annotated[
    int | None,
    typer.Option(
        "-c",
        "--ctx",
        metavar="N",
        min=1,
        help="Tokens of context.",
        show_default="trained length, at most 4096",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("-t", "--threads", metavar="N", min=1, help="CPU threads.", show_default="all cores"),
]
Kv = Annotated[
    str, typer.Option("--kv", metavar="TYPE", help="K/V cache: f16, int8 or f32, or K,V as in int8,f16.")
]
Overflow = Annotated[
    str,
    typer.Option(
        "--overflow",
        metavar="HOW",
        help="When the context is full: error, or slide: the oldest tokens leave it.",
    ),
]
_PINNED = "How many of the first tokens never leave the context."
Pinned = Annotated[int, typer.Option("--pinned", metavar="N", min=0, help=_PINNED)]
PinnedSystem = Annotated[
    int | None,
    typer.Option("--pinned", metavar="N", min=0, help=_PINNED, show_default="the system message"),
]
Window = Annotated[
    int | None,
    typer.Option(
        "--window",
        metavar="N",
        min=0,
        help="Every layer sees only the last N tokens; 0: all of them.",
        show_default="as the file says",
    ),
]
Rope = Annotated[
    str | None,
    typer.Option(
        "--rope",
        metavar="TYPE[,KEY=X]…",
        help="RoPE scaling: none, linear, ntk, dynamic, yarn or llama3, as in yarn,factor=4.",
        show_default="as the file says",
    ),
]
Chunk = Annotated[int, typer.Option("--chunk", metavar="N", min=1, help="Prompt tokens evaluated together.")]
Device = Annotated[str, typer.Option("--device", metavar="NAME", help="cpu, or cuda: an NVIDIA GPU.")]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="reference: on the CPU, plain and slow, for comparison.",
        show_default="the device's own",
    ),
]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show timings on stderr.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def kv_types(text: str) -> str | tuple[str, str]:
    """``f16`` or ``f32,f16`` as Session takes it. The session knows which names there are."""
    k, comma, v = text.partition(",")
    return (k, v) if comma else k


def sampling(
    name: str,
    temp: float | None,
    top_k: int,
    top_p: float,
    min_p: float,
    repeat_penalty: float,
    seed: int | None,
) -> Sampling:
    """What the options say; without --temp the registry's temperature for that model, if it has one."""
    if temp is None and not Path(name).expanduser().is_file():
        from ringlm import hub

        info = hub.Registry.load().entries.get(name)
        temp = None if info is None else info.temperature
    return Sampling(
        temperature=DEFAULTS.temperature if temp is None else temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repeat_penalty,
        seed=seed,
    )


def rope_scaling(text: str | None) -> dict[str, str | float] | None:
    """``yarn,factor=4`` as Model takes it, which knows what there is."""
    if text is None:
        return None
    kind, *pairs = text.split(",")
    rope: dict[str, str | float] = {"rope_type": kind}
    for pair in pairs:
        key, _, value = pair.partition("=")
        try:
            rope[key] = float(value)
        except ValueError:
            raise InvalidArgument(f"--rope: {pair!r} is not of the form KEY=NUMBER") from None
    return rope


@contextmanager
def opened(
    name: str,
    threads: int | None,
    device: str,
    backend: str | None,
    window: int | None = None,
    rope: str | None = None,
) -> Iterator[Model]:
    """The model that ``name`` means, downloaded with a view of the progress if need be."""
    from ringlm import hub
    from ringlm.model import Model

    with PullView() as progress:
        path = hub.resolve(name, progress=progress)
    with Model(
        path, n_threads=threads, device=device, backend=backend, window=window, rope=rope_scaling(rope)
    ) as model:
        yield model


@contextmanager
def plain_warnings() -> Iterator[None]:
    """A Python warning is one line on stderr."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        sys.stderr.write(f"ringlm: warning: {' '.join(str(message).split())}\n")

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        yield


def read_text(source: Path | None) -> str:
    """A UTF-8 file, or all of stdin. Raises InvalidArgument for other encodings, OSError."""
    raw = sys.stdin.buffer.read() if source is None else source.read_bytes()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise InvalidArgument(
            f"{source or 'stdin'} is not UTF-8 text: byte {e.start} is 0x{raw[e.start]:02x}; convert it first"
        ) from None


class StatusLine:
    """A line on stderr that is written over; nothing where stderr is not a terminal."""

    def __init__(self) -> None:
        self._on = sys.stderr.isatty()
        self._shown = 0

    def show(self, text: str) -> None:
        if not self._on:
            return
        import shutil

        text = text[: shutil.get_terminal_size().columns - 1]
        sys.stderr.write("\r" + text.ljust(self._shown))
        sys.stderr.flush()
        self._shown = len(text)

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r" + " " * self._shown + "\r")
            sys.stderr.flush()
            self._shown = 0


def write(text: str) -> None:
    """To stdout at once, whatever characters the terminal knows."""
    if not text:
        return
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
