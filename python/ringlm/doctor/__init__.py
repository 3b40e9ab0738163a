"""What is wrong with a model file, and what to do about it.

Most damage of model files does not stop them from running: an end token that is none, a RoPE base that was
lost in conversion, a missing pre-tokenizer. The answers are only worse, or never end. ``diagnose`` asks the
file about what is known to go wrong, and ringlm itself about the rest by opening it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

from ringlm.doctor import text, weights
from ringlm.doctor.facts import CONVERT, Facts, Finding, Findings
from ringlm.errors import Error, FileFormatError, UnsupportedModelError

__all__ = ["Finding", "diagnose"]

_CHECKS: tuple[Callable[[Facts], Findings], ...] = (
    weights.check_alignment,
    weights.check_context,
    weights.check_heads,
    weights.check_projections,
    weights.check_rope,
    weights.check_rope_base,
    weights.check_rope_factors,
    weights.check_vocabulary_size,
    weights.check_values,
    text.check_arrays,
    text.check_pre_tokenizer,
    text.check_special_ids,
    text.check_special_texts,
    text.check_bos,
    text.check_templates,
    text.check_markers,
    text.check_end_of_turn,
)


def diagnose(path: str | os.PathLike[str]) -> list[Finding]:
    """All findings, errors first; none for a file with which nothing is wrong.

    Raises nothing for whatever the file holds: one that cannot be opened is a finding. Reads the metadata and
    samples of the tensors, not the whole file.
    """
    import ringlm._core as core

    try:
        file = core.GGUF(os.fspath(path))
    except Error as error:
        return [_refusal("the file", error, "nothing of it can be read")]
    facts = Facts(os.fspath(path), file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say is a finding of its own
        found = [finding for check in _CHECKS for finding in check(facts)]
        found += _refusals(facts, found)
    return sorted(found, key=lambda finding: finding.severity)


def _refusals(facts: Facts, found: list[Finding]) -> Findings:
    """What ringlm itself says when it opens the model and the vocabulary, unless it was found already."""
    known = [finding.where for finding in found if finding.severity == "error"]
    if facts.refusal is not None and not any(where in str(facts.refusal) for where in known):
        yield _refusal("the model", facts.refusal, "it does not run")
    if facts.text("tokenizer.ggml.model") is None:
        yield Finding(
            "error",
            "tokenizer.ggml.model",
            "missing",
            "there is no vocabulary: only token ids can be used",
            CONVERT,
        )
        return
    error = facts.tokenizer
    if isinstance(error, Error) and not any(where in str(error) for where in known):
        yield _refusal("the vocabulary", error, "text cannot be turned into tokens")


def _refusal(where: str, error: Error, consequence: str) -> Finding:
    if isinstance(error, UnsupportedModelError):
        remedy = "take another model or quantization, or a program that supports this one"
    elif isinstance(error, FileFormatError):
        remedy = "fetch the file again, and if it is the same, convert the model again"
    else:
        remedy = "see that it is there and that it may be read"
    return Finding("error", where, str(error).rstrip("."), consequence, remedy)
