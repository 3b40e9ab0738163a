"""Sizes and metadata out of config.json: what all families share, and what only some have."""

from __future__ import annotations

from collections.abc import Mapping

from ringlm.errors import FileFormatError, UnsupportedModelError

from .config import Config
from .rope import Metadata

Sizes = Mapping[str, int]


def sizes(config: Config) -> dict[str, int]:
    """The named sizes of shapes. Raises FileFormatError for a field that is missing or does not fit."""
    n_head = config.integer("num_attention_heads")
    n_head_kv = config.integer("num_key_value_heads") if "num_key_value_heads" in config else n_head
    embd = config.integer("hidden_size")
    head_dim = config.integer("head_dim") if "head_dim" in config else embd // n_head
    if "head_dim" not in config and embd % n_head:
        raise FileFormatError(f"{config.file}: hidden_size {embd} is no multiple of {n_head} heads")
    if head_dim % 2:
        raise FileFormatError(f"{config.file}: heads of {head_dim} numbers; RoPE turns pairs of them")
    if n_head % n_head_kv:
        raise FileFormatError(f"{config.file}: {n_head} query heads do not share {n_head_kv} key/value heads")
    found = {
        "one": 1,
        "vocab": config.integer("vocab_size"),
        "layers": config.integer("num_hidden_layers"),
        "ctx": config.integer("max_position_embeddings"),
        "embd": embd,
        "ff": config.integer("intermediate_size"),
        "n_head": n_head,
        "n_head_kv": n_head_kv,
        "head_dim": head_dim,
        "q": n_head * head_dim,
        "kv": n_head_kv * head_dim,
    }
    found["qkv"] = found["q"] + 2 * found["kv"]
    found["two_ff"] = 2 * found["ff"]
    found["half_ff"] = found["ff"] // 2
    for key in ("num_local_experts", "num_experts"):
        if key in config:
            found["experts"] = config.integer(key)
    found["expert_ff"] = (
        config.integer("moe_intermediate_size") if "moe_intermediate_size" in config else found["ff"]
    )
    if "shared_expert_intermediate_size" in config:
        found["shared_ff"] = config.integer("shared_expert_intermediate_size")
    return found


def is_sparse(config: Config, layer: int) -> bool:
    """Whether this layer of a mixture of experts has any (decoder_sparse_step, mlp_only_layers)."""
    step = config.integer("decoder_sparse_step") if "decoder_sparse_step" in config else 1
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise FileFormatError(f"{config.file}: mlp_only_layers is {dense!r}; expected a list of layers")
    return layer not in dense and (layer + 1) % step == 0


def common_metadata(config: Config, arch: str, activations: tuple[str, ...], sizes: Sizes) -> Metadata:
    """The metadata that all families share, without the architecture's name and RoPE."""
    activation = config.get("hidden_activation") or config.get("hidden_act")
    if activation not in activations:
        raise UnsupportedModelError(
            f"{config.file}: hidden_act is {activation!r}; {arch} computes {activations[0]}"
        )
    return {
        "vocab_size": sizes["vocab"],
        "context_length": sizes["ctx"],
        "embedding_length": sizes["embd"],
        "block_count": sizes["layers"],
        "feed_forward_length": sizes["ff"],
        "attention.head_count": sizes["n_head"],
        "attention.head_count_kv": sizes["n_head_kv"],
        "attention.key_length": sizes["head_dim"],
        "attention.value_length": sizes["head_dim"],
        "attention.layer_norm_rms_epsilon": config.positive("rms_norm_eps"),
    }


# What only some families have.


def _refuse(config: Config, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{config.file}: {what} cannot be converted: the GGUF of this architecture has no key for it"
    )


def _window(config: Config) -> Metadata:
    if "sliding_window" not in config:
        return {}
    return {"attention.sliding_window": config.integer("sliding_window")}


def mistral(config: Config, sizes: Sizes) -> Metadata:
    return _window(config)


def mixtral(config: Config, sizes: Sizes) -> Metadata:
    return _window(config) | _expert_counts(config, sizes)


def _expert_counts(config: Config, sizes: Sizes) -> Metadata:
    if "experts" not in sizes:
        raise FileFormatError(f"{config.file}: num_experts is missing")
    return {
        "expert_count": sizes["experts"],
        "expert_used_count": config.integer("num_experts_per_tok"),
    }


def no_window(config: Config, sizes: Sizes) -> Metadata:
    layers = config.get("layer_types")
    is_full = isinstance(layers, list) and "sliding_attention" not in layers
    if config.get("use_sliding_window") and not is_full:
        raise _refuse(config, "use_sliding_window = true")
    return {}


def qwen_moe(config: Config, sizes: Sizes) -> Metadata:
    metadata = no_window(config, sizes) | _expert_counts(config, sizes)
    metadata["expert_feed_forward_length"] = sizes["expert_ff"]
    if "shared_ff" in sizes:
        metadata["expert_shared_feed_forward_length"] = sizes["shared_ff"]
    metadata["expert_weights_norm"] = config.flag("norm_topk_prob")
    return metadata


def qwen(config: Config, sizes: Sizes) -> Metadata:
    if config.positive("rotary_pct") != 1.0:
        raise _refuse(config, f"rotary_pct = {config.get('rotary_pct')}")
    if not config.flag("no_bias"):
        raise _refuse(config, "no_bias = false")
    # Longer texts need the dynamic NTK and log(n) scaling of Qwen's own code.
    return {"context_length": min(sizes["ctx"], config.integer("seq_length"))}


def _query_scale(config: Config, sizes: Sizes) -> Metadata:
    scale = config.positive("query_pre_attn_scalar")
    return {} if scale == sizes["head_dim"] else {"attention.scale": scale**-0.5}


def _only_causal(config: Config) -> None:
    if config.get("use_bidirectional_attention"):
        raise _refuse(config, "use_bidirectional_attention = true")


def gemma(config: Config, sizes: Sizes) -> Metadata:
    _only_causal(config)
    return {}


def _layer_types(config: Config, sizes: Sizes) -> list[bool]:
    """Whether each layer has a window: as layer_types says, else all but every sliding_window_pattern-th."""
    if "layer_types" in config:
        words = config.words("layer_types", sizes["layers"])
        unknown = sorted({*words} - {"sliding_attention", "full_attention"})
        if unknown:
            raise _refuse(config, f"layers of type {', '.join(unknown)}")
        return [word == "sliding_attention" for word in words]
    period = config.integer("sliding_window_pattern")
    return [bool((i + 1) % period) for i in range(sizes["layers"])]


def gemma2(config: Config, sizes: Sizes) -> Metadata:
    _only_causal(config)
    if _layer_types(config, sizes) != [i % 2 == 0 for i in range(sizes["layers"])]:
        raise _refuse(config, "another order of layers with and without a window than one by one")
    metadata: Metadata = {"attention.sliding_window": config.integer("sliding_window")}
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        metadata[key] = config.positive(key)
    return metadata | _query_scale(config, sizes)


def gemma3(config: Config, sizes: Sizes) -> Metadata:
    _only_causal(config)
    if "attn_logit_softcapping" in config:
        raise _refuse(config, "attn_logit_softcapping")
    metadata: Metadata = {"attention.sliding_window": config.integer("sliding_window")}
    metadata["attention.sliding_window_pattern"] = _pattern(_layer_types(config, sizes))
    if "final_logit_softcapping" in config:
        metadata["final_logit_softcapping"] = config.positive("final_logit_softcapping")
    return metadata | _query_scale(config, sizes)


def olmo3(config: Config, sizes: Sizes) -> Metadata:
    return {
        "attention.sliding_window": config.integer("sliding_window"),
        "attention.sliding_window_pattern": _pattern(_layer_types(config, sizes)),
    }


def _pattern(windowed: list[bool]) -> int | list[bool]:
    """n where every n-th layer sees everything and the others have a window, else one flag for each layer."""
    first_full = windowed.index(False) + 1 if False in windowed else len(windowed) + 1
    regular = [bool((i + 1) % first_full) for i in range(len(windowed))]
    return first_full if windowed == regular else windowed


def granite(config: Config, sizes: Sizes) -> Metadata:
    return {
        "embedding_scale": config.positive("embedding_multiplier"),
        "residual_scale": config.positive("residual_multiplier"),
        "attention.scale": config.positive("attention_multiplier"),
        "logit_scale": config.positive("logits_scaling"),
    }


def smollm3(config: Config, sizes: Sizes) -> Metadata:
    layers = sizes["layers"]
    expected = [int((i + 1) % 4 != 0) for i in range(layers)]
    if "no_rope_layers" in config:
        rotated = [int(n) for n in config.numbers("no_rope_layers", layers)]
    else:
        step = config.integer("no_rope_layer_interval")
        rotated = [int((i + 1) % step != 0) for i in range(layers)]
    if rotated != expected:
        raise _refuse(
            config, f"RoPE in layers {[i for i, on in enumerate(rotated) if on]} (all but every fourth)"
        )
    return no_window(config, sizes)
