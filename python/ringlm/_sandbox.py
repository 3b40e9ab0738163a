"""Where chat templates run: Jinja2's immutable sandbox, with a time limit, a budget and marked text.

A template comes with the model file and is as trustworthy as the file. The sandbox keeps it from Python; it
does not keep it from running for ever or from filling the memory. A thread can not be stopped from outside
and signals work in the main thread alone, so the template stops itself: the syntax tree is rewritten before
it is compiled so that every loop, comparison and concatenation passes through this environment, as calls,
operators, attributes, filters and tests do anyway. Each passage looks at the clock and pays for the size of
what it makes, in advance where a small expression makes a large result (``'a' * 10**10``). No single native
step is then longer than the budget is wide.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ringlm._filters import FILTERS, TESTS, WIDTH, Stopped, compare, text_of
from ringlm._provenance import METHODS, Record, mark, plain

__all__ = ["BUDGET", "Refused", "Sandbox", "Stopped"]

#: Characters and list elements that one rendering may make in all; more for longer conversations.
BUDGET = 64 * 2**20
_PER_ITERATION = 16  # a loop may also keep what it makes
_BITS = 4096  # of an integer
# Fields of format strings whose width or precision has five digits or is computed.
_PERCENT_WIDE = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\d*\.)?(?:\d{5}|\*)")
_BRACE_WIDE = re.compile(r"\{[^{}]*:[^{}]*(?:\d{5}|\{)")


class Refused(JinjaError):
    """The template called ``raise_exception``."""


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said, for training. Here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class _Instrument(NodeTransformer):
    """Routes what compiled templates do natively through methods of the environment."""

    @staticmethod
    def _call(method: str, args: list[nodes.Expr], at: nodes.Node) -> nodes.Call:
        target = nodes.EnvironmentAttribute(method, lineno=at.lineno)
        return nodes.Call(target, args, [], None, None, lineno=at.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._call("each", [node.iter], node)  # type: ignore[list-item]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        args = [node.expr]
        for operand in node.ops:
            args += [nodes.Const(operand.op, lineno=node.lineno), operand.expr]
        return self._call("compare", args, node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("concatenate", node.nodes, node)

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = self._call("hashed", [node.key], node)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._call("made", [node], node) if isinstance(node.arg, nodes.Slice) else node


class _Each:
    """What a loop iterates over. It has a length where the value has one, as ``loop.length`` wants."""

    def __init__(self, env: Sandbox, values: Iterable[Any]) -> None:
        self._env, self._values = env, values

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            self._env.pay(_PER_ITERATION)
            yield value

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]  # a TypeError is the answer of a generator


class _Meter(threading.local):
    deadline = float("inf")
    left = BUDGET
    limit = 0.0


class Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # the optimizer would evaluate constants before the budget counts
            finalize=self.finish,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self._meter = _Meter()
        self.filters, self.tests = dict(FILTERS), dict(TESTS)
        self.globals = {
            "range": self.globals["range"],
            "namespace": self.globals["namespace"],
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
            "dict": _dict,
            "raise_exception": _raise_exception,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Instrument().visit(tree)
        tree.set_environment(self)
        return tree

    # ---- the meter -----------------------------------------------------------------------------------------

    @contextmanager
    def metered(self, until: float, budget: int, limit: float) -> Iterator[None]:
        """The limits of everything that this thread does with the environment inside the block: until when
        (time.monotonic), how much, and the time limit that messages name."""
        meter = self._meter
        meter.deadline, meter.left, meter.limit = until, budget, limit
        try:
            yield
        finally:
            meter.deadline, meter.left = float("inf"), BUDGET

    def pay(self, size: int) -> None:
        meter = self._meter
        meter.left -= size
        if meter.left < 0:
            raise Stopped("the template makes more text or longer lists than any conversation needs")
        if time.monotonic() > meter.deadline:
            raise Stopped(f"the template ran for more than {meter.limit:g} s")

    def measure(self, value: Any) -> None:
        """Pays for every element inside, as often as comparing, hashing or printing would look at it.

        Lists that hold a shorter list twice, which does so again, have exponentially many.
        """
        if not isinstance(value, (list, tuple, dict)):
            return
        inner = [value]
        while inner:
            container = inner.pop()
            self.pay(len(container) + 1)
            items = container.values() if isinstance(container, dict) else container
            inner += [item for item in items if isinstance(item, (list, tuple, dict))]
            if isinstance(container, dict):
                inner += [key for key in container if isinstance(key, tuple)]

    def hashed(self, key: Any) -> Any:
        self.measure(key)
        return key

    def made(self, value: Any) -> Any:
        self.pay(len(value) if isinstance(value, (str, list, tuple, dict, set, bytes)) else 1)
        return value

    # ---- what templates do ---------------------------------------------------------------------------------

    def each(self, values: Any) -> Any:
        return _Each(self, values)

    def compare(self, left: Any, *rest: Any) -> bool:
        for op, right in zip(rest[::2], rest[1::2], strict=True):
            self.pay(1)
            if not compare(self, op, left, right):
                return False
            left = right
        return True

    def concatenate(self, *values: Any) -> str:
        return self.concat(text_of(self, value) for value in values)

    def concat(self, parts: Iterable[str]) -> str:
        """Joins the pieces of a template, a macro or a block."""
        kept = []
        for part in parts:
            self.pay(len(part))
            kept.append(part)
        return "".join(kept)

    def finish(self, value: Any) -> str:
        text = text_of(self, value)
        self.pay(len(text))
        return text

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(obj, "__self__", None) is self:  # put there by _Instrument
            return obj(*args)  # jinja2 adds its own keywords inside loops
        self.pay(1)
        self.measure([*args, *kwargs.values()])
        return self.made(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return self.binary(operator, left, right)

    def binary(self, operator: str, left: Any, right: Any) -> Any:
        self.pay(1)
        if operator == "%" and isinstance(left, str):
            _check_fields(_PERCENT_WIDE, left)
            self.measure(right)
            if isinstance(right, Mapping):
                return self.made(left % right)
            values = right if isinstance(right, tuple) else (right,)
            return self.made(left % tuple(_shown(self, value) for value in values))
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, (str, list, tuple)) and isinstance(times, int):
                    self.pay(len(many) * max(times, 0))
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _BITS:
                raise Stopped("the template makes an integer too large to be useful")
        if operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            self.pay(len(left) + len(right))
        return self.binop_table[operator](left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, str):
            return self._method(obj, attribute)
        if isinstance(obj, (int, float, complex, bytes)):
            return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            self.measure(argument)
        if isinstance(argument, str):
            if isinstance(obj, (str, int, float, complex, bytes)):
                return self.getattr(obj, argument)
            if isinstance(obj, dict) and argument not in obj:
                argument = plain(argument)
        return super().getitem(obj, argument)

    def _method(self, text: str, name: str) -> Any:
        if name == "format":
            _check_fields(_BRACE_WIDE, text)
            fill = super().getattr(text, name)
            return lambda *args, **kwargs: fill(
                *(_shown(self, arg) for arg in args),
                **{key: _shown(self, kwargs[key]) for key in kwargs},
            )
        method = METHODS.get(name)
        if method is None:
            return self.undefined(obj=text, name=name)

        def bound(*args: Any, **kwargs: Any) -> Any:
            self._pay_for(name, text, args)
            return method(text, *args, **kwargs)

        return bound

    def _pay_for(self, name: str, text: str, args: tuple[Any, ...]) -> None:
        """In advance, for methods whose result may be much longer than what they are given."""
        if name in ("center", "ljust", "rjust", "zfill"):
            self.pay(max(len(text), args[0] if args and isinstance(args[0], int) else 0))
        elif name == "replace" and len(args) >= 2:
            self.pay(len(text) + plain(text).count(plain(str(args[0]))) * len(str(args[1])))
        elif name == "join" and args and isinstance(args[0], (list, tuple)):
            self.pay(sum(len(text) + len(x) for x in args[0] if isinstance(x, str)))
        else:
            self.pay(len(text) // 64)


def _shown(env: Sandbox, value: Any) -> Any:
    """Numbers as they are, so that a format applies to them; anything else as its text."""
    return value if isinstance(value, (int, float)) else text_of(env, value)


def _check_fields(wide: re.Pattern[str], text: str) -> None:
    if wide.search(plain(text)):
        raise Stopped(f"the template pads text to {WIDTH} characters or more, or to a computed width")


def _raise_exception(message: Any) -> None:
    raise Refused(plain(str(message)))


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """``dict(...)`` with all text keys marked, so that copies of data are looked up as data is."""
    return Record({mark(k) if isinstance(k, str) else k: v for k, v in dict(*args, **kwargs).items()})


def strftime_now(now: datetime) -> Callable[[str], str]:
    def function(form: str) -> str:
        form = plain(form)
        if len(form) > 200 or re.search(r"\d{4}", form):
            raise SecurityError("strftime_now takes a short format")
        return now.strftime(form)

    return function
