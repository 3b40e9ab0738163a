"""How tokens are drawn: the parameters, and the sampler of a session over many steps."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringlm.errors import InvalidArgument

if TYPE_CHECKING:
    import ringlm._core as core

__all__ = ["Sampling", "StepSampler", "TokenLogprobs", "new_sampler"]


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits: bias and penalties, top-k, top-p, min-p, temperature, draw.

    ``temperature`` 0 takes the most probable token; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.
    Penalties look at the last ``penalty_window`` tokens, those of the prompt too. ``logit_bias`` maps ids to
    what is added to their logits. The same ``seed`` draws the same tokens; None picks one.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 64
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None

    def replace(self, **changes: Any) -> Sampling:
        """A copy with changes. Raises TypeError for names that are no sampling parameters."""
        unknown = sorted(set(changes) - {f.name for f in dataclasses.fields(self)})
        if unknown:
            known = ", ".join(f.name for f in dataclasses.fields(self))
            raise TypeError(f"unknown sampling parameter {', '.join(unknown)}; known are {known}")
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class TokenLogprobs:
    """A generated token, its log-probability (natural, before any sampling parameter) and the most probable
    ones."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def new_sampler(n_vocab: int, how: Sampling) -> tuple[core.Sampler, int]:
    """A sampler at its beginning, and the seed that it got. Raises InvalidArgument."""
    import ringlm._core as core

    seed = secrets.randbits(63) if how.seed is None else how.seed
    params = {f.name: getattr(how, f.name) for f in dataclasses.fields(how)} | {"seed": seed}
    if params["logit_bias"] is not None:
        params["logit_bias"] = dict(params["logit_bias"])
    try:
        return core.Sampler(n_vocab, **params), seed
    except TypeError:  # of no number, or of one that fits no machine word
        raise InvalidArgument(f"{how!r:.500} holds what is no number, or a number out of range") from None


class StepSampler:
    """The sampler of a session that is stepped from outside, by Model.step.

    It begins with the first draw and anew after the session went back (rewind, reuse), then with another seed
    unless one is given. Tokens that were fed in other ways between two draws enter its penalty window. A draw
    counts when it is committed.
    """

    def __init__(self, n_vocab: int, how: Sampling) -> None:
        self._n_vocab, self.how = n_vocab, how
        self._sampler: core.Sampler | None = None
        self._next_seed = self._new_seed()  # of the next beginning; a copy begins with the same
        self._position = self._rewinds = 0  # of the session, as the sampler knows it

    def draw(self, native: core.Session, rewinds: int) -> tuple[int, core.Sampler]:
        """A token, and the sampler as it is afterwards: what to commit."""
        window, position = self.how.penalty_window, native.position
        if self._begins(rewinds):
            sampler, missed = new_sampler(self._n_vocab, self.how.replace(seed=self._next_seed))[0], position
        else:
            assert self._sampler is not None
            sampler, missed = self._sampler.copy(), position - self._position
        if n := min(missed, window):
            sampler.accept(native.tokens[-n:])
        return native.sample(sampler), sampler

    def commit(self, sampler: core.Sampler, position: int, rewinds: int) -> None:
        if self._begins(rewinds):
            self._next_seed = self._new_seed()
        self._sampler, self._position, self._rewinds = sampler, position, rewinds

    def copy(self) -> StepSampler:
        twin = StepSampler(self._n_vocab, self.how)
        if self._sampler is not None:
            twin.commit(self._sampler.copy(), self._position, self._rewinds)
        twin._next_seed = self._next_seed
        return twin

    def _begins(self, rewinds: int) -> bool:
        return self._sampler is None or rewinds != self._rewinds

    def _new_seed(self) -> int:
        return secrets.randbits(63) if self.how.seed is None else self.how.seed
