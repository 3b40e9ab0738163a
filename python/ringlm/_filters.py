"""Filters and tests of the template sandbox: aware of marked text, and paying for what they make.

Filters of jinja2 that no chat template needs and that take long on hostile input (``urlize``, ``xmlattr`` and
the like) are not there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jinja2 import Undefined, pass_context
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.filters import FILTERS as STOCK_FILTERS
from jinja2.runtime import Context
from jinja2.tests import TESTS as STOCK_TESTS
from markupsafe import escape

from ringlm._provenance import METHODS, carry, is_marked, mark, mark_data, plain, plain_data, to_json

if TYPE_CHECKING:
    from ringlm._sandbox import Sandbox

__all__ = ["FILTERS", "TESTS", "WIDTH", "Stopped", "compare", "text_of"]

#: Largest padding, indent, or number of batches.
WIDTH = 10_000


class Stopped(JinjaError):
    """The time limit or the budget is used up."""


def text_of(env: Sandbox, value: Any) -> str:
    """``str(value)``, in which what Python quotes stays readable and marked."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple, dict)):
        env.measure(value)
        shown, flat = str(value), str(plain_data(value))
        return shown if shown == flat else mark(flat)
    if value is None or isinstance(value, (int, float, complex, range, Undefined)):
        return str(value)
    return f"<{type(value).__name__}>"


def compare(env: Sandbox, op: str, left: Any, right: Any) -> bool:
    if isinstance(left, str) and isinstance(right, str):
        left, right = plain(left), plain(right)
    else:
        env.measure(left)
        env.measure(right)
    if op in ("in", "notin"):
        return _contains(right, left) is (op == "in")
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
    return _own(lambda env, value: getattr(plain(text_of(env, value)), name)())


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
        return env._method(text_of(env, value), name)(*args)

    return filtered


def _on_plain(name: str) -> Callable[..., Any]:
    """A stock filter that reads text: it is given the plain one, and its result is a person's."""
    stock = STOCK_FILTERS[name]
    wants = getattr(getattr(stock, "jinja_pass_arg", None), "name", None)

    @_own
    def filtered(env: Sandbox, value: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, int) and abs(a) > WIDTH for a in (*args, *kwargs.values())):
            raise Stopped(f"a number given to the filter {name!r} is larger than {WIDTH}")
        env.measure(value)
        marked = isinstance(value, str) and is_marked(value)
        result = stock(
            *((env,) if wants == "environment" else ()), plain(value) if marked else value, *args, **kwargs
        )
        return mark_data(result) if marked else result

    return filtered


@_own
def _title(env: Sandbox, value: Any) -> str:
    text = text_of(env, value)
    return carry(text, STOCK_FILTERS["title"](plain(text)))


@_own
def _replace(env: Sandbox, value: Any, old: Any, new: Any, count: int | None = None) -> Any:
    return env._method(text_of(env, value), "replace")(
        text_of(env, old), text_of(env, new), -1 if count is None else count
    )


@_own
def _trim(env: Sandbox, value: Any, chars: str | None = None) -> Any:
    return env._method(text_of(env, value), "strip")(chars)


@_own
def _join(env: Sandbox, value: Any, d: Any = "", attribute: Any = None) -> Any:
    items = (
        env.each(value)
        if attribute is None
        else (_attribute(env, item, attribute) for item in env.each(value))
    )
    return env._method(text_of(env, d), "join")([text_of(env, item) for item in items])


def _attribute(env: Sandbox, item: Any, attribute: Any) -> Any:
    for part in str(attribute).split("."):
        item = env.getitem(item, int(part) if part.isdigit() else part)
    return item


@_own
def _indent(env: Sandbox, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    space = width if isinstance(width, str) else " " * min(width, WIDTH)
    lines = METHODS["splitlines"](text_of(env, value) + "\n")
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
    env.measure(value)
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


def _key(env: Sandbox, case_sensitive: bool, attribute: Any = None) -> Callable[[Any], Any]:
    """What items are ordered by."""

    def one(item: Any, part: Any) -> Any:
        item = item if part is None else _attribute(env, item, part)
        env.measure(item)
        return item if not isinstance(item, str) else plain(item) if case_sensitive else plain(item).lower()

    parts = attribute.split(",") if isinstance(attribute, str) else [attribute]
    return lambda item: one(item, parts[0]) if len(parts) == 1 else [one(item, part) for part in parts]


@_own
def _sort(
    env: Sandbox, value: Any, reverse: bool = False, case_sensitive: bool = False, attribute: Any = None
) -> list[Any]:
    return sorted(env.each(value), key=_key(env, case_sensitive, attribute), reverse=reverse)


@_own
def _unique(env: Sandbox, value: Any, case_sensitive: bool = False, attribute: Any = None) -> list[Any]:
    key = _key(env, case_sensitive, attribute)
    first: dict[Any, Any] = {}
    for item in env.each(value):
        first.setdefault(key(item), item)
    return list(first.values())


def _extreme(choose: Callable[..., Any]) -> Callable[..., Any]:
    @_own
    def filtered(env: Sandbox, value: Any, case_sensitive: bool = False, attribute: Any = None) -> Any:
        items = list(env.each(value))
        return choose(items, key=_key(env, case_sensitive, attribute)) if items else env.undefined("no items")

    return filtered


@_own
def _dictsort(
    env: Sandbox, value: Any, case_sensitive: bool = False, by: str = "key", reverse: bool = False
) -> list[Any]:
    key = _key(env, case_sensitive)
    return sorted(value.items(), key=lambda item: key(item[0 if by == "key" else 1]), reverse=reverse)


@_own
def _groupby(env: Sandbox, value: Any, *args: Any, **kwargs: Any) -> Any:
    items = list(env.each(value))
    env.measure(items)
    return STOCK_FILTERS["groupby"](env, items, *args, **kwargs)


@_own
def _format(env: Sandbox, value: Any, *args: Any, **kwargs: Any) -> Any:
    return env.binary("%", text_of(env, value), kwargs or args)


@_own
def _escape(env: Sandbox, value: Any) -> str:
    text = text_of(env, value)
    return "".join(mark(str(escape(plain(c)))) if is_marked(c) else str(escape(c)) for c in text)


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
    **{name: _own(lambda env, value: text_of(env, value)) for name in ("string", "safe")},
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
    "sort": _sort,
    "unique": _unique,
    "min": _extreme(min),
    "max": _extreme(max),
    "dictsort": _dictsort,
    "groupby": _groupby,
    "format": _format,
    "attr": _attr,
}
_STOCK_FILTERS = (
    *("abs", "count", "d", "default", "first", "items", "last", "length", "list", "map"),
    *("reject", "rejectattr", "reverse", "round", "select", "selectattr"),
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
