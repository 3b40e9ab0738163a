"""Text that remembers, character by character, whether a template or a person wrote it.

A chat template is a program: it trims, splits, searches and joins the messages it is given. To know
afterwards which characters of its output came from a message, every character of a message is moved into code
points that Unicode leaves unassigned (planes 4 to 13) before the template runs, and moved back after it.
Slicing, joining, formatting and replacing carry the mark along by themselves, and nothing that a person types
can shed it. What has to be taught is everything that looks *at* characters (comparisons, ``split``,
``strip``, case, JSON escapes): the functions here read the plain text, then cut the marked one. The mapping
is one to one, so offsets agree.

An operation that is not taught sees unknown characters: it may then take another branch, but it can not turn
a person's text into template text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

__all__ = [
    "METHODS",
    "Record",
    "clean",
    "is_marked",
    "mark",
    "mark_data",
    "plain",
    "plain_data",
    "runs",
    "to_json",
]

_MARKED = re.compile("[\U00040000-\U000dffff]")
_RUN = re.compile("[\U00040000-\U000dffff]+")
_UNUSABLE = re.compile("[\ud800-\udfff\U00040000-\U000dffff]")


class _ToMarked(dict[int, int]):
    def __missing__(self, code: int) -> int:
        # Planes 0 to 3 move up by 4 planes, planes 14 to 16 down by 6; 4 to 13 never reach this (see clean).
        self[code] = marked = code + 0x40000 if code < 0x40000 else code - 0x60000
        return marked


class _ToPlain(dict[int, int]):
    def __missing__(self, code: int) -> int:
        if 0x40000 <= code < 0x80000:
            self[code] = code - 0x40000
        elif 0x80000 <= code < 0xB0000:
            self[code] = code + 0x60000
        else:
            self[code] = code
        return self[code]


_TO_MARKED, _TO_PLAIN = _ToMarked(), _ToPlain()


def clean(text: str) -> str:
    """``text`` with U+FFFD for what no UTF-8 text holds: lone surrogates, and the unassigned planes 4 to
    13."""
    return text if text.isascii() else _UNUSABLE.sub("\ufffd", text)


def mark(text: str) -> str:
    """Marks every character that is not marked yet."""
    if is_marked(text):
        text = plain(text)
    return text.translate(_TO_MARKED)


def plain(text: str) -> str:
    return text.translate(_TO_PLAIN) if is_marked(text) else text


def is_marked(text: str) -> bool:
    """True if any character is marked."""
    return not text.isascii() and _MARKED.search(text) is not None


def runs(text: str) -> Iterator[tuple[int, int, bool]]:
    """Cuts text into maximal ``(start, end, marked)``."""
    at = 0
    for found in _RUN.finditer(text):
        if at < found.start():
            yield at, found.start(), False
        yield found.start(), found.end(), True
        at = found.end()
    if at < len(text):
        yield at, len(text), False


def carry(source: str, result: str) -> str:
    """``result``, computed from plain ``source``, with the marks of ``source``; all marked if the lengths
    differ."""
    if len(result) != len(source):
        return mark(result)
    return "".join(mark(result[a:b]) if marked else result[a:b] for a, b, marked in runs(source))


# ---- data --------------------------------------------------------------------------------------------------


class Record(dict[Any, Any]):
    """A mapping of marked keys that is looked up by plain ones, as ``message['content']`` does."""

    @staticmethod
    def _key(key: Any) -> Any:
        return mark(key) if isinstance(key, str) else key

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self._key(key))

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._key(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._key(key), default)

    def copy(self) -> Record:
        return Record(self)


def mark_data(value: Any) -> Any:
    """A deep copy of JSON-like data in which all text is marked."""
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, Mapping):
        return Record({mark(k) if isinstance(k, str) else k: mark_data(v) for k, v in value.items()})
    if isinstance(value, (list, tuple)):
        return [mark_data(item) for item in value]
    return value


def plain_data(value: Any) -> Any:
    """A deep copy of lists and mappings without marks."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, Mapping):
        return {plain(k) if isinstance(k, str) else k: plain_data(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain_data(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain_data(item) for item in value)
    return value


def to_json(value: Any, *, ensure_ascii: bool, **options: Any) -> str:
    """``json.dumps`` that escapes marked characters as their plain ones and leaves them marked."""
    return _escape(json.dumps(value, ensure_ascii=False, **options), ensure_ascii)


def _escape(text: str, ensure_ascii: bool) -> str:
    def one(found: re.Match[str]) -> str:
        return "".join(mark(json.dumps(c, ensure_ascii=ensure_ascii)[1:-1]) for c in plain(found[0]))

    text = re.sub(_TO_ESCAPE_ASCII if ensure_ascii else _TO_ESCAPE, one, text)
    if ensure_ascii:
        text = re.sub("[\x7f-\U0003ffff\U000e0000-\U0010ffff]", lambda c: json.dumps(c[0])[1:-1], text)
    return text


_TO_ESCAPE = re.compile(f"[{mark(chr(0))}-{mark(chr(0x1F))}{mark(chr(34))}{mark(chr(92))}]+")
_TO_ESCAPE_ASCII = re.compile(
    f"[{mark(chr(0))}-{mark(chr(0x1F))}{mark(chr(34))}{mark(chr(92))}{mark(chr(0x7F))}-\U000affff]+"
)


# ---- the methods of str ------------------------------------------------------------------------------------


def _locate(text: str, pieces: Iterable[str], gap: int | None) -> list[str]:
    """The slices of ``text`` that hold ``pieces`` of its plain form, ``gap`` apart (None: white space)."""
    flat, at, out = plain(text), 0, []
    for piece in pieces:
        if gap is None:
            at = flat.index(piece, at)
        out.append(text[at : at + len(piece)])
        at += len(piece) + (gap or 0)
    return out


def _split(text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
    sep = None if sep is None else plain(sep)
    return _locate(text, plain(text).split(sep, maxsplit), None if sep is None else len(sep))


def _rsplit(text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
    sep = None if sep is None else plain(sep)
    return _locate(text, plain(text).rsplit(sep, maxsplit), None if sep is None else len(sep))


def _splitlines(text: str, keepends: bool = False) -> list[str]:
    flat = plain(text)
    whole = _locate(text, flat.splitlines(True), 0)
    return whole if keepends else [w[: len(p)] for w, p in zip(whole, flat.splitlines(), strict=True)]


def _partition(text: str, sep: str) -> tuple[str, ...]:
    return tuple(_locate(text, plain(text).partition(plain(sep)), 0))


def _rpartition(text: str, sep: str) -> tuple[str, ...]:
    return tuple(_locate(text, plain(text).rpartition(plain(sep)), 0))


def _lstrip(text: str, chars: str | None = None) -> str:
    return text[len(text) - len(plain(text).lstrip(chars and plain(chars))) :]


def _rstrip(text: str, chars: str | None = None) -> str:
    return text[: len(plain(text).rstrip(chars and plain(chars)))]


def _strip(text: str, chars: str | None = None) -> str:
    return _lstrip(_rstrip(text, chars), chars)


def _removeprefix(text: str, prefix: str) -> str:
    return text[len(text) - len(plain(text).removeprefix(plain(prefix))) :]


def _removesuffix(text: str, suffix: str) -> str:
    return text[: len(plain(text).removesuffix(plain(suffix)))]


def _replace(text: str, old: str, new: str, count: int = -1) -> str:
    old = plain(old)
    if not old:
        places = len(text) + 1 if count < 0 else min(count, len(text) + 1)
        return "".join(new + text[i : i + 1] for i in range(places)) + text[places:]
    return new.join(_split(text, old, count))


def _cased(name: str) -> Callable[[str], str]:
    change: Callable[[str], str] = getattr(str, name)

    def method(text: str) -> str:
        whole = change(plain(text))
        if len(whole) == len(text):
            return carry(text, whole)
        parts = (mark(change(plain(text[a:b]))) if m else change(text[a:b]) for a, b, m in runs(text))
        split = "".join(parts)
        return split if plain(split) == whole else mark(whole)

    return method


def _looking(name: str) -> Callable[..., Any]:
    look = getattr(str, name)

    def method(text: str, *args: Any) -> Any:
        return look(plain(text), *(plain_data(arg) for arg in args))

    return method


#: name -> function(text, \*arguments): the methods of str that a template may call, aware of marks.
METHODS: dict[str, Callable[..., Any]] = {
    "split": _split,
    "rsplit": _rsplit,
    "splitlines": _splitlines,
    "partition": _partition,
    "rpartition": _rpartition,
    "strip": _strip,
    "lstrip": _lstrip,
    "rstrip": _rstrip,
    "removeprefix": _removeprefix,
    "removesuffix": _removesuffix,
    "replace": _replace,
    "join": str.join,
    "center": str.center,
    "ljust": str.ljust,
    "rjust": str.rjust,
    "zfill": str.zfill,
    **{name: _cased(name) for name in ("lower", "upper", "casefold", "swapcase", "title", "capitalize")},
    **{
        name: _looking(name)
        for name in (
            *("startswith", "endswith", "find", "rfind", "index", "rindex", "count"),
            *("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower"),
            *("isnumeric", "isprintable", "isspace", "istitle", "isupper"),
        )
    },
}
