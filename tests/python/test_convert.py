"""Checkpoints become GGUF files: tensors, types, metadata, and what happens to the target.

The oracles are the arrays that went in and the gguf package."""

from __future__ import annotations

import errno
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import (
    Array,
    Tensors,
    as_bf16,
    from_bf16,
    llama_config,
    llama_tensors,
    read_gguf,
    value_types,
    values,
    write_checkpoint,
    write_shards,
)
from hf_llama import interleaved
from ringlm import FileFormatError, InvalidArgument, NumericError, UnsupportedModelError
from ringlm.cli import main
from ringlm.convert import TYPES, convert, plan

CONFIG = llama_config()
TENSORS = llama_tensors(CONFIG)


def converted(
    folder: Path, config: dict[str, Any], tensors: Tensors, type: str = "f32"
) -> tuple[dict[str, Any], dict[str, gguf.ReaderTensor]]:
    source = write_checkpoint(folder / "checkpoint", config, tensors)
    convert(source, folder / "out.gguf", type, tokenizer=False)
    return read_gguf(folder / "out.gguf")


def expected_llama(tensors: Tensors, n_layer: int = 2) -> Tensors:
    """The arrays under the names of GGUF, rows of Q and K so that RoPE turns neighbours."""
    found = {
        "token_embd.weight": tensors["model.embed_tokens.weight"],
        "output_norm.weight": tensors["model.norm.weight"],
        "output.weight": tensors["lm_head.weight"],
    }
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for i in range(n_layer):
        for ours, theirs in names.items():
            w = tensors[f"model.layers.{i}.{theirs}.weight"]
            heads = {"attn_q": 4, "attn_k": 2}.get(ours)
            found[f"blk.{i}.{ours}.weight"] = interleaved(w, heads) if heads else w
    return found


def test_every_tensor_is_there_as_it_was(tmp_path: Path) -> None:
    _, found = converted(tmp_path, CONFIG, TENSORS)
    expected = expected_llama(TENSORS)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].tensor_type == gguf.GGMLQuantizationType.F32
        np.testing.assert_array_equal(values(found[name]), array, name)


def test_metadata(tmp_path: Path) -> None:
    found, _ = converted(tmp_path, CONFIG, TENSORS, "q8_0")
    assert found == {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "checkpoint",
        "general.file_type": gguf.LlamaFileType.MOSTLY_Q8_0,
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
        "llama.vocab_size": 40,
        "llama.context_length": 256,
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 32,
        "llama.attention.value_length": 32,
        "llama.attention.layer_norm_rms_epsilon": np.float32(1e-5),
        "llama.rope.dimension_count": 32,
        "llama.rope.freq_base": 500000.0,
    }
    types = value_types(tmp_path / "out.gguf")
    strings = {"general.architecture", "general.type", "general.name"}
    floats = {"llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base"}
    for key, type in types.items():
        assert type == ["STRING" if key in strings else "FLOAT32" if key in floats else "UINT32"], key


@pytest.mark.parametrize("type", ["f16", "q8_0", "q4_0", "q4_1"])
def test_types(tmp_path: Path, type: str) -> None:
    metadata, found = converted(tmp_path, CONFIG, TENSORS, type)
    assert metadata["general.file_type"] == getattr(gguf.LlamaFileType, f"MOSTLY_{type.upper()}")
    for name, array in expected_llama(TENSORS).items():
        wanted = gguf.GGMLQuantizationType[type.upper()]
        if array.ndim == 1:
            wanted = gguf.GGMLQuantizationType.F32
        elif type.startswith("q4") and name in ("token_embd.weight", "output.weight"):
            wanted = gguf.GGMLQuantizationType.Q8_0
        assert found[name].tensor_type == wanted, name
        raw = gguf.quants.quantize(array, wanted)
        assert found[name].data.tobytes() == raw.tobytes(), name


def test_rows_that_blocks_do_not_divide_are_f16(tmp_path: Path) -> None:
    config = llama_config(intermediate_size=80)
    tensors = llama_tensors(config)
    _, found = converted(tmp_path, config, tensors, "q4_0")
    down = found["blk.1.ffn_down.weight"]
    assert down.tensor_type == gguf.GGMLQuantizationType.F16
    np.testing.assert_array_equal(
        values(down), tensors["model.layers.1.mlp.down_proj.weight"].astype(np.float16)
    )
    assert found["blk.1.ffn_up.weight"].tensor_type == gguf.GGMLQuantizationType.Q4_0


@pytest.mark.parametrize("make, back", [(as_bf16, from_bf16), (np.float16, np.float32)])
def test_narrow_checkpoints(
    tmp_path: Path, make: Callable[[Array], Array], back: Callable[[Array], Array]
) -> None:
    narrow = {name: make(array) for name, array in TENSORS.items()}
    _, found = converted(tmp_path, CONFIG, narrow)
    for name, array in expected_llama({n: back(a) for n, a in narrow.items()}).items():
        np.testing.assert_array_equal(values(found[name]), array, name)


def test_shards_give_the_same_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one" / "m", CONFIG, TENSORS)
    write_shards(tmp_path / "three" / "m", CONFIG, TENSORS, 3)
    for name in ("one", "three"):
        convert(tmp_path / name / "m", tmp_path / f"{name}.gguf", "q8_0", tokenizer=False)
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "three.gguf").read_bytes()


@pytest.mark.parametrize("type", TYPES)
def test_pieces_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type: str) -> None:
    folder = write_checkpoint(tmp_path / "m", CONFIG, TENSORS)
    convert(folder, tmp_path / "whole.gguf", type, tokenizer=False)
    monkeypatch.setattr(plan, "_BLOCK", 200)  # three rows of 64
    convert(folder, tmp_path / "pieces.gguf", type, tokenizer=False)
    assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "pieces.gguf").read_bytes()


def test_memory_does_not_depend_on_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = llama_config(vocab_size=40_000, num_hidden_layers=1)  # an embedding of 10 MB
    folder = write_checkpoint(tmp_path / "m", config, llama_tensors(config))
    monkeypatch.setattr(plan, "_BLOCK", 1 << 14)
    tracemalloc.start()
    try:
        convert(folder, tmp_path / "m.gguf", "q8_0", tokenizer=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 << 20


def test_tied_embeddings(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=True)
    _, found = converted(tmp_path, config, llama_tensors(config))
    assert "output.weight" not in found
    # Some tools save the head once more. It is the embedding.
    _, again = converted(tmp_path, config, TENSORS)
    assert again.keys() == found.keys()


def test_constants_of_old_checkpoints_are_left_out(tmp_path: Path) -> None:
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}
    _, found = converted(tmp_path, CONFIG, {**TENSORS, **more})
    assert found.keys() == expected_llama(TENSORS).keys()


def test_biases_go_with_their_rows(tmp_path: Path) -> None:
    bias = np.arange(128, dtype=np.float32)
    _, found = converted(tmp_path, CONFIG, {**TENSORS, "model.layers.1.self_attn.q_proj.bias": bias}, "f16")
    np.testing.assert_array_equal(values(found["blk.1.attn_q.bias"]), interleaved(bias, 4))


# Where it goes.


def test_a_file_is_replaced_when_the_new_one_is_whole(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", CONFIG, TENSORS)
    target = tmp_path / "out" / "m.gguf"
    target.parent.mkdir()
    target.write_text("before")
    seen = set()

    def progress(done: int, total: int, name: str) -> None:
        seen.add((target.read_text(), len(list(target.parent.iterdir()))))
        assert 0 < done <= total

    result = convert(folder, target, tokenizer=False, progress=progress)
    assert seen == {("before", 2)}
    assert [*target.parent.iterdir()] == [target]
    assert (result.path, result.architecture, result.n_tensors) == (target, "llama", 21)
    assert result.nbytes == target.stat().st_size


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.ENOSPC, "no space"), SystemExit(143)])
def test_nothing_remains_of_a_conversion_that_ends_early(tmp_path: Path, error: BaseException) -> None:
    folder = write_checkpoint(tmp_path / "m", CONFIG, TENSORS)
    target = tmp_path / "out" / "m.gguf"
    target.parent.mkdir()
    target.write_text("before")

    def progress(done: int, total: int, name: str) -> None:
        if done > total // 2:
            raise error

    with pytest.raises(error if isinstance(error, type) else type(error)):
        convert(folder, target, tokenizer=False, progress=progress)
    assert [*target.parent.iterdir()] == [target] and target.read_text() == "before"


def test_the_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", CONFIG, TENSORS)
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(InvalidArgument, match="is a file of the checkpoint"):
        convert(folder, folder / "model.safetensors", tokenizer=False)
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_full_disk_is_seen_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path / "m", CONFIG, TENSORS)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match="are needed, 1,000 are free") as caught:
        convert(folder, tmp_path / "m.gguf", tokenizer=False)
    assert caught.value.errno == errno.ENOSPC and not (tmp_path / "m.gguf").exists()


# What cannot be converted.


def without(name: str) -> Callable[[dict[str, Any], Tensors], None]:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        del (config if name in config else tensors)[name]

    return change


def said(**fields: Any) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda config, tensors: config.update(fields)


def put(name: str, array: Array) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda config, tensors: tensors.update({name: array})


def filled(name: str, value: float) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda config, tensors: tensors.update({name: np.full_like(tensors[name], value)})


Q = "model.layers.1.self_attn.q_proj.weight"
ROPE = {"rope_theta": 1e4, "factor": 4.0}
WRONG: dict[str, tuple[Callable[[dict[str, Any], Tensors], None], type[Exception], str]] = {
    "no-architecture": (without("architectures"), UnsupportedModelError, "None; supported are LlamaFor"),
    "another-architecture": (
        said(architectures=["BertModel"]),
        UnsupportedModelError,
        "'BertModel'.*Qwen2Moe",
    ),
    "no-width": (without("hidden_size"), FileFormatError, "hidden_size is missing"),
    "no-epsilon": (without("rms_norm_eps"), FileFormatError, "rms_norm_eps is missing"),
    "width-is-text": (said(hidden_size="64"), FileFormatError, "hidden_size is '64'; expected an integer"),
    "no-layers": (said(num_hidden_layers=0), FileFormatError, "num_hidden_layers is 0"),
    "heads-do-not-fit": (said(num_key_value_heads=3), FileFormatError, "4 query heads do not share 3"),
    "gelu": (said(hidden_act="gelu"), UnsupportedModelError, "hidden_act is 'gelu'; llama computes silu"),
    "partial-rotary": (said(partial_rotary_factor=0.5), UnsupportedModelError, "partial_rotary_factor 0.5"),
    "a-tensor-less": (without(Q), FileFormatError, f"no tensor {Q}; expected one of shape .128, 64"),
    "a-layer-less": (said(num_hidden_layers=3), FileFormatError, "no tensor model.layers.2"),
    "a-layer-more": (said(num_hidden_layers=1), FileFormatError, "no place for model.layers.1.* and 5 more"),
    "a-tensor-more": (
        put("model.layers.0.self_attn.rel.weight", np.ones(4, np.float32)),
        FileFormatError,
        "llama has no place for model.layers.0.self_attn.rel.weight",
    ),
    "no-head": (without("lm_head.weight"), FileFormatError, "no tensor lm_head.weight"),
    "another-shape": (said(intermediate_size=64), FileFormatError, "gate_proj.weight has shape .96, 64"),
    "integers": (
        put(Q, np.ones((128, 64), np.int32)),
        FileFormatError,
        f"{Q} is I32; expected F32, F16, BF16",
    ),
    "nan": (filled(Q, np.nan), NumericError, f"{Q}' has NaN or infinity"),
    "too-large": (filled(Q, 7e4), NumericError, f"{Q}' has a value of 70000; F16 holds"),
    "rope-unknown": (
        said(rope_scaling={"type": "abc", **ROPE}),
        UnsupportedModelError,
        "RoPE scaling of type 'abc'; supported are default, linear, yarn, llama3, longrope",
    ),
    "rope-no-factor": (said(rope_scaling={"type": "linear"}), FileFormatError, "factor is missing"),
    "yarn-not-truncated": (
        said(rope_scaling={"rope_type": "yarn", "truncate": False, **ROPE}),
        UnsupportedModelError,
        "truncate = false",
    ),
    "another-quantization": (
        said(quantization_config={"quant_method": "bitsandbytes"}),
        UnsupportedModelError,
        "'bitsandbytes'; supported are awq and gptq",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(tmp_path: Path, name: str) -> None:
    change, error, words = WRONG[name]
    config, tensors = dict(CONFIG), dict(TENSORS)
    change(config, tensors)
    folder = write_checkpoint(tmp_path / "m", config, tensors)
    with pytest.raises(error, match=words):
        convert(folder, tmp_path / "m.gguf", tokenizer=False)
    assert [*tmp_path.iterdir()] == [folder]


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="type is 'q9'; expected f32, f16"):
        convert(tmp_path, tmp_path / "m.gguf", "q9")
    with pytest.raises(InvalidArgument, match="is no folder"):
        convert(tmp_path / "nowhere", tmp_path / "m.gguf")
    with pytest.raises(FileFormatError, match=r"there is no config\.json"):
        convert(tmp_path, tmp_path / "m.gguf")
    folder = write_checkpoint(tmp_path / "m", CONFIG, TENSORS)
    with pytest.raises(FileFormatError, match="; with --no-tokenizer"):
        convert(folder, tmp_path / "m.gguf")
    with pytest.raises(FileNotFoundError):
        convert(folder, tmp_path / "no" / "m.gguf", tokenizer=False)


def test_any_value_of_any_field_is_a_typed_error_or_converted(tmp_path: Path) -> None:
    """Hostile configs: no field can make anything else happen."""
    config = llama_config(
        attention_bias=False,
        rope_parameters={"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ROPE},
        original_max_position_embeddings=64,
        quantization_config=None,
        text_config=None,
    )
    folder = write_checkpoint(tmp_path / "m", config, TENSORS)
    odd: list[Any] = [None, True, 0, -1, 3, 2**70, 1e40, -0.5, "", "x", [], [1], ["x"], {}, {"a": 1}]
    n_failed = 0
    for key in config:
        for value in odd:
            (folder / "config.json").write_text(json.dumps({**config, key: value}))
            try:
                convert(folder, tmp_path / "m.gguf", tokenizer=False)
            except (FileFormatError, UnsupportedModelError, NumericError):
                n_failed += 1
    assert n_failed > 150


# The command.


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path / "m", CONFIG, TENSORS)
    target = tmp_path / "m.gguf"
    assert main(["convert", str(folder), str(target), "--type", "q4_1", "--no-tokenizer"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{target}: llama, 21 tensors, {target.stat().st_size:,} bytes\n"
    assert err == "converting m\n"

    (folder / "config.json").write_text("{}")
    assert main(["convert", str(folder), str(target)]) == 1
    assert capsys.readouterr().err.startswith(f"ringlm: error: {folder}/config.json: architectures is None")
