"""The models that `ringlm pull` knows, where they have been pulled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ringlm import Model, Tokenizer
from ringlm.perplexity import perplexity

pytestmark = pytest.mark.real_model


@pytest.fixture
def smollm2(pulled: Callable[[str], Path]) -> Model:
    return Model(pulled("smollm2-135m"))


@pytest.fixture(params=["smollm2-135m", "gemma-3-270m"])
def tokenizer(request: pytest.FixtureRequest, pulled: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer(pulled(request.param))


def test_greedy_continuation_knows_the_capital(smollm2: Model) -> None:
    answer = smollm2.create_completion("The capital of France is", max_tokens=24, temperature=0)
    text = answer["choices"][0]["text"]
    assert text.startswith(" Paris")
    assert answer["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 5,
        "completion_tokens": 24,
        "total_tokens": 29,
        "prompt_tokens_details": None,
    }


def test_a_second_turn_prefills_only_its_own_tokens(smollm2: Model) -> None:
    with smollm2.chat(temperature=0, n_ctx=512) as chat:
        assert "Paris" in chat.ask("What is the capital of France?")
        first = chat.last_usage
        assert first is not None and first.cached_tokens == 0
        held = chat.session.position
        assert "Rome" in chat.ask("And of Italy?")
        second = chat.last_usage
        assert second is not None and second.cached_tokens == held
        # <|im_end|>\n, then the user's turn and the assistant's header.
        own = "<|im_end|>\n<|im_start|>user\nAnd of Italy?<|im_end|>\n<|im_start|>assistant\n"
        assert second.prefill_tokens == len(smollm2.tokenizer.encode(own, parse_special=True))


def test_the_backends_agree(smollm2: Model) -> None:
    tokens = smollm2.tokenizer.encode("The capital of France is Paris, and the capital of Italy is")
    with Model(smollm2.path, backend="reference") as reference:
        expected = reference.session(n_ctx=64).prefill(tokens)
    found = smollm2.session(n_ctx=64).prefill(tokens)
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("The capital of France is Paris. The capital of Italy is", " Rome"),
        ("1, 2, 3, 4, 5,", " 6"),
        ("Monday, Tuesday, Wednesday,", " Thursday"),
    ],
)
def test_gemma_continues_sensibly(pulled: Callable[[str], Path], prompt: str, answer: str) -> None:
    with Model(pulled("gemma-3-270m")) as gemma:
        found = gemma.create_completion(prompt, max_tokens=4, temperature=0)["choices"][0]["text"]
        assert found.startswith(answer), found


# By llama-cpp-python 0.3.36 with the weights in float32:
#   python benchmarks/perplexity_vs_llamacpp.py MODEL.gguf LICENSE --float32
PERPLEXITIES = {"gemma-3-270m": (10.1129, 2323), "smollm2-135m": (15.9157, 2215)}


@pytest.mark.parametrize("name", PERPLEXITIES)
def test_perplexity_is_that_of_llama_cpp(pulled: Callable[[str], Path], name: str) -> None:
    text = (Path(__file__).resolve().parents[2] / "LICENSE").read_text()
    expected, n_tokens = PERPLEXITIES[name]
    with Model(pulled(name)) as model:
        ids = model.tokenizer.encode(text)
        found = perplexity(model, ids, n_ctx=512).perplexity
    assert len(ids) == n_tokens
    assert abs(found / expected - 1.0) < 0.005


def test_a_typed_control_token_stays_text(tokenizer: Tokenizer) -> None:
    control = [i for i in range(tokenizer.n_vocab) if tokenizer.is_control(i)]
    assert control
    for i in control:
        name = tokenizer.token_text(i)
        typed = tokenizer.encode(name, add_special=False)
        assert not any(map(tokenizer.is_control, typed)), name
        assert tokenizer.decode(typed) == name
        assert tokenizer.encode(name, add_special=False, parse_special=True) == [i]


def test_text_comes_back(tokenizer: Tokenizer) -> None:
    from tokenizer_data import NASTY, SENTENCES, random_texts

    # SmolLM2's vocabulary lacks some control characters and the planes 4 to 12.
    expressible = {b for i in range(tokenizer.n_vocab) for b in tokenizer.token_bytes(i)[:1]}
    texts = [
        t for t in [*NASTY, *SENTENCES, *random_texts(300, seed=4)] if expressible.issuperset(t.encode())
    ]
    assert len(texts) > 300
    for text in texts:
        # A typed U+2581 is a space to SentencePiece.
        spelled = text if tokenizer.model == "gpt2" else text.replace("\u2581", " ")
        assert tokenizer.decode(tokenizer.encode(text)) == spelled
    assert tokenizer.eog_ids >= {tokenizer.eos_id, tokenizer.eot_id}
