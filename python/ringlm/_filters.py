"""Filters and tests of the template sandbox: aware of marked text, and paying for what they make.

Filters of jinja2 that no chat template needs and that take long on hostile input (``urlize``, ``xmlattr`` and
the like) are not there.
"""

from __future__ import annotations

import html
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jinja2 import Undefined, pass_context
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.filters import FILTERS as STOCK_FILTERS
from jinja2.runtime import Context
from jinja2.tests import TESTS as STOCK_TESTS

from ringlm._provenance import METHODS, carry, is_marked, mark, mark_data, plain, plain_data, to_json

if TYPE_CHECKING:
    from ringlm._sandbox import Sandbox

__all__ = ["FILTERS", "TESTS", "WIDTH", "Stopped", "compare", "text_of"]

#: Largest padding, indent, or number of batches.
WIDTH = 10_000


class Stopped(JinjaError):
    """The time limit or the budget is used up."""


def text_of(value: Any) -> str:
    """``str(value)``, in which what Python quotes stays readable and marked."""
    if isinstance(value, str):
        return value
    shown = str(value)
    if isinstance(value, (list, tuple, dict)):
        flat = str(plain_data(value))
        return shown if shown == flat else mark(flat)
    return shown


def compare(op: str, left: Any, right: Any) -> bool:
    if op in ("in", "notin"):
        return _contains(right, left) is (op == "in")
    if isinstance(left, str) and isinstance(right, str):
        left, right = plain(left), plain(right)
    return bool(_OPERATORS[op](left, right))


def _contains(container: Any, value: Any) -> bool:
    if isinstance(value, str):
        flat = plain(value)
        if isinstance(container, str):
            return flat in plain(container)
        if isinstance(container, (list, tuple)):
            return any(isinstance(x, str) and plain(x) == flat for x in container)
        if isinstance(container, dict):
            return value in container or flat in container
        if isinstance(container, Iterable):
            return any(isinstance(x, str) and plain(x) == flat for x in container)
    return value in container


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
}
_COMPARING = {
    "eq": ("==", "eq", "equalto"),
    "ne": ("!=", "ne"),
    "lt": ("<", "lt", "lessthan"),
    "lteq": ("<=", "le"),
    "gt": (">", "gt", "greaterthan"),
    "gteq": (">=", "ge"),
    "in": ("in",),
}


def _comparison(op: str) -> Callable[[Sandbox, Any, Any], bool]:
    return _own(lambda env, left, right: env.compare(left, op, right))


def _is_cased(name: str) -> Callable[[Sandbox, Any], bool]:
    return _own(lambda env, value: getattr(plain(text_of(value)), name)())


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    function.takes_sandbox = True  # type: ignore[attr-defined]
    return function


def _metered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that pays. Taking the context also keeps jinja2 from evaluating it at compile time."""
    wants = getattr(getattr(function, "jinja_pass_arg", None), "name", None)
    own = getattr(function, "takes_sandbox", False)

    @pass_context
    def filtered(context: Context, *args: Any, **kwargs: Any) -> Any:
        env: Any = context.environment
        env.pay(1)
        passed: dict[str | None, Any] = {
            "context": context,
            "environment": env,
            "eval_context": context.eval_ctx,
        }
        given = (env, *args) if own else (passed[wants], *args) if wants else args
        return env.made(function(*given, **kwargs))

    return filtered


def _by_method(name: str) -> Callable[..., Any]:
    @_own
    def filtered(env: Sandbox, value: Any, *args: Any) -> Any:
        return env._method(text_of(value), name)(*args)

    return filtered


def _on_plain(name: str) -> Callable[..., Any]:
    """A stock filter that reads text: it is given the plain one, and its result is a person's."""
    stock = STOCK_FILTERS[name]
    wants = getattr(getattr(stock, "jinja_pass_arg", None), "name", None)

    @_own
    def filtered(env: Sandbox, value: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, int) and abs(a) > WIDTH for a in (*args, *kwargs.values())):
            raise Stopped(f"a number given to the filter {name!r} is larger than {WIDTH}")
        marked = isinstance(value, str) and is_marked(value)
        result = stock(
            *((env,) if wants == "environment" else ()), plain(value) if marked else value, *args, **kwargs
        )
        return mark_data(result) if marked else result

    return filtered


@_own
def _title(env: Sandbox, value: Any) -> str:
    text = text_of(value)
    return carry(text, STOCK_FILTERS["title"](plain(text)))


@_own
def _replace(env: Sandbox, value: Any, old: Any, new: Any, count: int | None = None) -> Any:
    return env._method(text_of(value), "replace")(text_of(old), text_of(new), -1 if count is None else count)


@_own
def _trim(env: Sandbox, value: Any, chars: str | None = None) -> Any:
    return env._method(text_of(value), "strip")(chars)


@_own
def _join(env: Sandbox, value: Any, d: Any = "", attribute: Any = None) -> Any:
    items = [
        text_of(item if attribute is None else _attribute(env, item, attribute)) for item in env.each(value)
    ]
    return env._method(text_of(d), "join")(items)


def _attribute(env: Sandbox, item: Any, attribute: Any) -> Any:
    for part in str(attribute).split("."):
        item = env.getitem(item, int(part) if part.isdigit() else part)
    return item


@_own
def _indent(env: Sandbox, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    space = width if isinstance(width, str) else " " * min(width, WIDTH)
    lines = METHODS["splitlines"](text_of(value) + "\n")
    env.pay(len(lines) * (len(space) + 1))
    kept = [
        line if i == 0 and not first else space + line if line or blank else line
        for i, line in enumerate(lines)
    ]
    return "\n".join(kept)


@_own
def _number(env: Sandbox, value: Any, default: Any = 0, base: int = 10) -> Any:
    value = plain(value) if isinstance(value, str) else value
    return (
        default
        if isinstance(value, str) and len(value) > 1000
        else STOCK_FILTERS["int"](value, default, base)
    )


@_own
def _float(env: Sandbox, value: Any, default: Any = 0.0) -> Any:
    return STOCK_FILTERS["float"](plain(value) if isinstance(value, str) else value, default)


@_own
def _tojson(
    env: Sandbox,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face templates expect it: no HTML escapes, no ASCII escapes unless asked for."""
    env.pay(sum(len(space) for space in (separators or ()) if isinstance(space, str)))
    if isinstance(indent, int):
        indent = min(indent, 64)
    separators = tuple(separators) if separators else None  # type: ignore[assignment]
    return to_json(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@_own
def _sum(env: Sandbox, values: Any, attribute: Any = None, start: Any = 0) -> Any:
    for item in env.each(values):
        start = env.binary("+", start, item if attribute is None else _attribute(env, item, attribute))
    return start


@_own
def _format(env: Sandbox, value: Any, *args: Any, **kwargs: Any) -> Any:
    return env.binary("%", text_of(value), kwargs or args)


@_own
def _escape(env: Sandbox, value: Any) -> str:
    text = text_of(value)
    return "".join(mark(html.escape(plain(c))) if is_marked(c) else html.escape(c) for c in text)


@_own
def _attr(env: Sandbox, value: Any, name: str) -> Any:
    if isinstance(value, (str, Mapping)):
        return env.undefined(obj=value, name=name)
    found = env.getattr(value, name)
    return env.undefined(obj=value, name=name) if isinstance(found, Undefined) else found


_OWN_FILTERS: dict[str, Callable[..., Any]] = {
    **{name: _by_method(name) for name in ("lower", "upper", "capitalize")},
    **{
        name: _on_plain(name)
        for name in ("center", "truncate", "wordwrap", "wordcount", "urlencode", "batch", "slice")
    },
    **{name: _own(lambda env, value: text_of(value)) for name in ("string", "safe")},
    **{name: _escape for name in ("e", "escape", "forceescape")},
    "title": _title,
    "replace": _replace,
    "trim": _trim,
    "join": _join,
    "indent": _indent,
    "int": _number,
    "float": _float,
    "tojson": _tojson,
    "sum": _sum,
    "format": _format,
    "attr": _attr,
}
_STOCK_FILTERS = (
    *(
        "abs",
        "count",
        "d",
        "default",
        "dictsort",
        "first",
        "groupby",
        "items",
        "last",
        "length",
        "list",
        "map",
    ),
    *("max", "min", "reject", "rejectattr", "reverse", "round", "select", "selectattr", "sort", "unique"),
)

FILTERS: dict[str, Callable[..., Any]] = {
    **{name: _metered(STOCK_FILTERS[name]) for name in _STOCK_FILTERS},
    **{name: _metered(function) for name, function in _OWN_FILTERS.items()},
}
TESTS: dict[str, Callable[..., Any]] = {
    **{name: _metered(function) for name, function in dict[str, Any](STOCK_TESTS).items()},
    **{name: _metered(_comparison(op)) for op, names in _COMPARING.items() for name in names},
    **{name: _metered(_is_cased(f"is{name}")) for name in ("lower", "upper")},
}
