"""``ringlm chat``: a conversation in the terminal, or through pipes.

What the model says goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from . import options as opt
from .app import app

if TYPE_CHECKING:
    from ringlm.chat import Chat

HELP = """\
/clear      begin a new conversation
/save FILE  write the conversation as JSON
/help       show this
/exit       leave; so does Ctrl-D
Ctrl-C      stop the answer; leave where there is none
Alt-Enter   begin a new line"""


@app.command("chat")
def chat_command(
    name: opt.ModelName = opt.DEFAULT_MODEL,
    system: Annotated[
        str | None, typer.Option("-s", "--system", metavar="TEXT", help="System message.")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", metavar="TEXT", help="Answer this and leave; -: all of stdin."),
    ] = None,
    max_tokens: opt.MaxTokens = None,
    temp: opt.Temperature = None,
    top_k: opt.TopK = opt.DEFAULTS.top_k,
    top_p: opt.TopP = opt.DEFAULTS.top_p,
    min_p: opt.MinP = opt.DEFAULTS.min_p,
    repeat_penalty: opt.RepeatPenalty = opt.DEFAULTS.repetition_penalty,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    template: Annotated[
        str | None,
        typer.Option("--template", metavar="NAME", help="One of the model's chat templates."),
    ] = None,
    n_ctx: opt.Context = None,
    threads: opt.Threads = None,
    kv: opt.Kv = "f16",
    pinned: opt.PinnedSystem = None,
    overflow: opt.Overflow = "slide",
    window: opt.Window = None,
    rope: opt.Rope = None,
    chunk: opt.Chunk = 128,
    device: opt.Device = "cpu",
    backend: opt.Backend = None,
    verbose: opt.Verbose = False,
) -> None:
    """Chat with a model.

    In a terminal, /help lists the commands. From a pipe or a file each line is one message of the same
    conversation; -p - takes all of it as one. When the context is full, the oldest turns are forgotten."""
    text = opt.read_text(None).removesuffix("\n") if prompt == "-" else prompt
    sampling = opt.sampling(name, temp, top_k, top_p, min_p, repeat_penalty, seed)
    with (
        opt.plain_warnings(),
        opt.opened(name, threads, device, backend, window, rope) as model,
        model.chat(
            system,
            template,
            n_ctx=n_ctx,
            kv=opt.kv_types(kv),
            chunk=chunk,
            pinned=pinned,
            overflow=overflow,
            stop=stop,
            max_tokens=max_tokens,
            sampling=sampling,
        ) as chat,
    ):
        talk = Conversation(chat, verbose)
        if text is not None:
            if not talk.say(text):
                raise typer.Exit(130)
        elif sys.stdin.isatty():
            title = (model.config.name or model.path.name) if "/" in name else name
            _note(f"{title}, context {chat.session.n_ctx}; /help lists commands")
            talk.interact()
        elif not talk.read(sys.stdin):
            raise typer.Exit(1)


class Conversation:
    """A chat with its commands, on stdout and stderr."""

    def __init__(self, chat: Chat, verbose: bool) -> None:
        self._chat = chat
        self._verbose = verbose
        self._before = ""  # what stands between two answers
        self._told = False  # that older turns are being forgotten

    def interact(self) -> None:
        """Asks for messages until the user leaves. Raises KeyboardInterrupt when Ctrl-C was how."""
        ask = _prompter()
        while True:
            try:
                line = ask()
            except EOFError:
                return
            try:
                if not self.handle(line):
                    return
            except Exception as e:
                _complain(e)

    def read(self, lines: Iterator[str]) -> bool:
        """A message for each line that is not blank. False if one failed; the others were answered."""
        good = True
        for line in lines:
            if not line.strip():
                continue
            try:
                if not self.handle(line.rstrip("\r\n")):
                    break
            except Exception as e:
                _complain(e)
                good = False
        return good

    def handle(self, line: str) -> bool:
        """Does what a command says, or sends the line. False to leave."""
        command = re.match(r"/[a-z]*(?=\s|$)", line.strip())
        if command is None:
            if line.strip():
                good = self.say(line)
                if not sys.stdin.isatty():
                    if not good:
                        raise typer.Exit(130)
                    self._before = "\n"
            return True
        argument = line.strip()[command.end() :].strip()
        if command[0] == "/exit":
            return False
        if command[0] == "/clear":
            self._chat.reset()
            _note("new conversation")
        elif command[0] == "/save":
            self._save(argument)
        elif command[0] == "/help":
            _note(HELP)
        else:
            _note(f"there is no command {command[0]}; /help lists them")
        return True

    def say(self, text: str) -> bool:
        """Prints the answer as it comes; False if Ctrl-C stopped it. What was said until then stays said."""
        chat, status, last = self._chat, opt.StatusLine(), ""

        def progress(done: int, total: int) -> None:
            if interrupted():
                raise _Stopped
            if done < total:
                status.show(f"reading {done} of {total} tokens")

        with _interrupts() as interrupted:
            answer = chat.send(text, progress=progress)
            try:
                for piece in answer:
                    if not last:
                        status.clear()
                        opt.write(self._before)
                    opt.write(piece)
                    last = piece
                    if interrupted():
                        break
            except _Stopped:
                pass
            finally:
                status.clear()
                answer.close()
                if last and not last.endswith("\n"):
                    opt.write("\n")
            if not last:
                opt.write("\n")
            stopped = interrupted()
        if not stopped:
            self._notes()
        elif not last:
            _note("stopped before the answer began: the message was not sent")
        return not stopped

    def _notes(self) -> None:
        chat, usage = self._chat, self._chat.last_usage
        session, stats = chat.session, chat.session.stats
        if (
            chat.finish_reason == "length"
            and session.overflow == "error"
            and stats.position >= session.n_ctx - 1
        ):
            _note(
                f"the answer was cut: the context of {session.n_ctx} tokens is full. "
                "/clear begins anew, -c gives more"
            )
        elif chat.finish_reason == "length" and chat.max_tokens is None and usage is not None:
            _note(f"the answer was cut after {usage.completion_tokens} tokens; -n sets another limit")
        if chat.forgetful and not self._told:
            self._told = True
            _note(
                f"the context of {session.n_ctx} tokens is full: older turns are being forgotten. "
                "/clear begins anew, -c gives more"
            )
        if self._verbose and usage is not None:
            _note(
                f"{usage.prefill_tokens} tokens read in {usage.prefill_seconds:.2f} s "
                f"({usage.cached_tokens} were known), {usage.completion_tokens} said in "
                f"{usage.decode_seconds:.2f} s, {chat.finish_reason}"
            )

    def _save(self, argument: str) -> None:
        if not argument:
            _note("where to? /save FILE")
            return
        path = Path(argument).expanduser()
        self._chat.save(path)
        _note(f"saved {path}")


class _Stopped(Exception):
    """Ends a prefill after Ctrl-C."""


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Within: the first Ctrl-C is only remembered, for which the yielded function asks; the second one is a
    KeyboardInterrupt. So no step of a conversation is cut in two by the first."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


def _prompter() -> Callable[[], str]:
    """A function that asks for one message on the terminal, with the history of earlier ones."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output

    from ringlm import hub

    history: History
    try:
        path = hub.cache_dir() / "chat_history"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        history = FileHistory(str(path))
    except OSError:
        history = InMemoryHistory()
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        history=history, key_bindings=keys, output=create_output(always_prefer_tty=True)
    )
    return lambda: session.prompt("> ")


def _complain(e: Exception) -> None:
    """An error that the conversation survives, as one line."""
    from ringlm.errors import ContextOverflow, Error

    from .app import state

    if state.debug or isinstance(e, BrokenPipeError) or not isinstance(e, (Error, OSError)):
        raise e
    advice = "; /clear begins a new conversation" if isinstance(e, ContextOverflow) else ""
    _note(f"ringlm: error: {' '.join(str(e).split())}{advice}")


def _note(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
