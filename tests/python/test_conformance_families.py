"""Every family of models against Hugging Face transformers: random models, made there and converted.

Logits, greedy text and perplexity in float32, across the windows and the switch of LongRoPE; and that a model
with any single feature switched off would be noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recipes
from random_llama import worst
from ringlm import FileFormatError, UnsupportedModelError

NEEDS = "conformance with transformers needs: pip install 'ringlm[conformance]'"
torch = pytest.importorskip("torch", reason=NEEDS)
pytest.importorskip("transformers", reason=NEEDS)
import families  # noqa: E402
from families import N_TOKENS, made  # noqa: E402

pytestmark = pytest.mark.conformance

LIMIT = 1e-4  # largest difference over largest logit
NAMES = recipes.names()

Record = Callable[[str, Any], None]


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    yield
    torch.set_num_threads(before)
    families.forget()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, backend: str, record_property: Record) -> None:
    error = max(families.errors(name, backend))
    record_property("worst_relative_error", error)
    assert error < LIMIT


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token(name: str, record_property: Record) -> None:
    m = made(name)
    session, found = families.session(m.path)
    session.prefill(m.tokens[:20])
    errors = []
    for n in range(21, N_TOKENS + 1):
        session.decode(m.tokens[n - 1], found)
        if n in (21, 25, 47, 48, 49, 50, N_TOKENS):  # behind the windows; around the switch
            errors.append(worst(found, m.expected(n)[-1]))
    record_property("worst_relative_error", max(errors))
    assert max(errors) < LIMIT
    # A step does not know how its context was read, also where that was turned anew.
    assert np.array_equal(found, families.read_at_once(m.path, m.tokens)[-1])


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text(name: str) -> None:
    m = made(name)
    session, logits = families.session(m.path)
    session.prefill(m.tokens[:36], logits)
    text = list(m.tokens[:36])
    for _ in range(20):
        expected = recipes.reference_logits(m.reference, text)[-1]
        best, second = np.sort(expected)[[-1, -2]]
        assert best - second > 2 * LIMIT * np.abs(expected).max(), "a tie: choose another prompt"
        assert logits.argmax() == expected.argmax(), f"token {len(text)}"
        text.append(int(expected.argmax()))
        session.decode(text[-1], logits)


@pytest.mark.parametrize("name", NAMES)
def test_perplexity(name: str, record_property: Record) -> None:
    m = made(name)
    session, _ = families.session(m.path)
    session.prefill(m.tokens[:1])
    found = expected = 0.0
    for n in range(1, N_TOKENS):
        logits = m.expected(n)[-1] if n < 60 else m.expected()[n - 1]
        expected -= logits[m.tokens[n]] - np.logaddexp.reduce(logits)
        found -= session.log_probability(m.tokens[n])
        session.decode(m.tokens[n])
    error = abs(np.exp((found - expected) / (N_TOKENS - 1)) - 1.0)
    record_property("relative_error", error)
    assert error < LIMIT


# ---- switched off ------------------------------------------------------------------------------------------

#: Metadata that only tells shapes, which tensors contradict, or nothing about the arithmetic.
SHAPES = {
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "expert_count", "expert_feed_forward_length", "expert_shared_feed_forward_length",
}  # fmt: skip

#: Every other key, and a value that means "off".
OFF: dict[str, Callable[[Any], Any]] = {
    "attention.layer_norm_rms_epsilon": lambda eps: 1.0,
    "attention.sliding_window": lambda window: window - 1,
    "attention.sliding_window_pattern": lambda p: [not x for x in p] if isinstance(p, list) else p - 1,
    "attention.scale": lambda scale: 0.0,
    "attn_logit_softcapping": lambda cap: 0.0,
    "final_logit_softcapping": lambda cap: 0.0,
    "embedding_scale": lambda scale: 0.0,
    "residual_scale": lambda scale: 0.0,
    "logit_scale": lambda scale: 0.0,
    "rope.dimension_count": lambda dims: dims // 2,
    "rope.freq_base": lambda base: base * 8,
    "rope.freq_base_swa": lambda base: base * 2,
    "rope.scaling.type": lambda kind: "linear" if kind == "longrope" else "none",
    "rope.scaling.factor": lambda factor: factor + 1,
    "rope.scaling.original_context_length": lambda n: n * 4,
    "rope.scaling.attn_factor": lambda factor: 1.0001,  # 1 would be the formula's
    "rope.scaling.yarn_beta_fast": lambda beta: 32.0,
    "rope.scaling.yarn_beta_slow": lambda beta: 1.0,
    "expert_used_count": lambda n: n - 1,
    "expert_weights_norm": lambda norm: not norm,
}

#: What an architecture's name alone says, and one that differs from it in that.
OTHER_NAMES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "smollm3": {"layers that do not turn": ("llama", {})},
    "gemma": {
        "activation": ("qwen3", {"embedding_scale": 8.0}),
        "embedding scale": ("gemma", {"embedding_scale": 1.0}),
    },
}


def paired_otherwise(metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Rows of every head of Q and K in the order of the other pairing."""
    n_head, n_head_kv = (metadata[f"attention.head_count{kv}"] for kv in ("", "_kv"))
    dim, turning = metadata["attention.key_length"], metadata["rope.dimension_count"]
    halves = np.arange(turning).reshape(2, -1).T.ravel()  # 0, n/2, 1, n/2 + 1, ...
    neighbours = np.argsort(halves)
    order = neighbours if metadata["general.architecture"] in ("llama", "granite", "smollm3") else halves
    for name, w in tensors.items():
        kind = name.split(".")[-2]
        heads = {"attn_q": n_head, "attn_k": n_head_kv, "attn_qkv": n_head + n_head_kv}.get(kind)
        if heads is None:
            continue
        turned = w[: heads * dim].reshape(heads, dim, -1)
        turned[:, :turning] = turned[:, order]


def without(names: list[str]) -> families.Change:
    def change(_: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        for name in names:
            # What an architecture cannot be without is there and does nothing.
            neutral = np.ones_like if "norm" in name or name.startswith("rope_f") else np.zeros_like
            tensors[name] = neutral(tensors[name])

    return change


def changes(path: Path, name: str) -> Iterator[tuple[str, families.Change]]:
    """Every single feature of a file, and how it is switched off."""
    seen: dict[str, list[str]] = {}

    def look(metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        for key in metadata:
            if not key.startswith("general.") and key not in SHAPES:
                assert key in OFF, f"{key} is new: say what switches it off"
                seen[key] = []
        for tensor, data in tensors.items():
            kind = tensor.split(".", 2)[2] if tensor.startswith("blk.") else tensor
            # Vectors, and the matrices that not every model has.
            if data.ndim == 1 or "_inp" in kind or "_exps" in kind or "_shexp" in kind:
                seen.setdefault("tensor " + kind, []).append(tensor)

    families.edited(path, path.with_suffix(".same"), look).unlink()
    for what, tensors in seen.items():
        if tensors:
            yield what, without(tensors)
        else:
            yield what, lambda m, _, key=what: m.update({key: OFF[key](m[key])})  # type: ignore[misc]
    yield "pairing", paired_otherwise
    for what, (other, metadata) in OTHER_NAMES.get(name, {}).items():
        yield what, lambda m, _, o=other, x=metadata: m.update({"general.architecture": o, **x})  # type: ignore[misc]


@pytest.mark.parametrize("name", NAMES)
def test_no_feature_can_be_missing(name: str, tmp_path: Path, record_property: Record) -> None:
    m = made(name)
    right = worst(families.read_at_once(m.path, m.tokens), m.expected())
    least: tuple[float, str] = (np.inf, "")
    for what, change in changes(m.path, name):
        path = families.edited(m.path, tmp_path / "off.gguf", change)
        try:
            wrong = max(
                worst(families.read_at_once(path, m.tokens[:n]), m.expected(n)) for n in (40, N_TOKENS)
            )
        except (FileFormatError, UnsupportedModelError):  # noticed at once: the tensors contradict it
            continue
        least = min(least, (wrong, what))
    record_property("least_error_without_a_feature", least)
    assert least[0] > 100 * LIMIT, f"without {least[1]} the error is only {least[0]:.1e}"
    assert least[0] > 100 * right


#: Modules that are left out altogether, on the side of transformers: norms, which with their weights at one
#: would still divide, and activations.
MODULES = [
    "input_layernorm",
    "q_norm",
    "k_norm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "act_fn",
    "activation_fn",
]


@pytest.mark.parametrize("name", NAMES)
def test_no_module_can_be_missing(name: str, record_property: Record) -> None:
    m = made(name)
    found = families.read_at_once(m.path, m.tokens)
    seen = {}
    for part in MODULES:
        owners = [x for x in m.reference.modules() if isinstance(getattr(x, part, None), torch.nn.Module)]
        if not owners:
            continue
        kept = [getattr(x, part) for x in owners]
        for x in owners:
            setattr(x, part, torch.nn.Identity())
        seen[part] = worst(found, recipes.reference_logits(m.reference, m.tokens))
        for x, module in zip(owners, kept, strict=True):
            setattr(x, part, module)
    record_property("errors", seen)
    assert seen and min(seen.values()) > 100 * LIMIT, seen
