"""Tables in Markdown, and the bars that were missed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


def table(head: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """The first `left` columns are text."""
    lines = ["| " + " | ".join(head) + " |"]
    lines.append("|" + "---|" * left + "--:|" * (len(head) - left))
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)


def span(values: Iterable[float], form: str = "{:,}") -> str:
    low, high = min(found := list(values)), max(found)
    texts = form.format(low), form.format(high)
    return texts[0] if texts[0] == texts[1] else f"{texts[0]} to {texts[1]}"


@dataclass
class Bars:
    missed: list[str] = field(default_factory=list)

    def check(self, good: bool, what: str) -> None:
        if not good:
            self.missed.append(what)
