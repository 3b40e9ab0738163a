"""The architectures of Hugging Face that can be converted, as data: tensors, metadata, defaults.

Names and shapes are those of the checkpoints' config.json and safetensors; GGUF names and keys those of the
`gguf` package (``gguf.constants``). Shapes are given by the names of ``hyperparameters.sizes``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from . import hyperparameters
from .config import Config
from .hyperparameters import Sizes
from .rope import Metadata

Bias = Literal["none", "optional", "required"]


@dataclass(frozen=True)
class Tensor:
    """A tensor of a layer: `hf` (any of these names) becomes `gguf`, both without ``.weight``.

    `shape` names the sizes of rows and columns, or of a vector. `heads` names how many heads the rows make
    up, where RoPE turns them. `exact` matrices stay float32.
    """

    hf: str | tuple[str, ...]
    gguf: str
    shape: tuple[str, ...]
    bias: Bias = "none"
    heads: str | None = None
    exact: bool = False

    @property
    def hf_names(self) -> tuple[str, ...]:
        return (self.hf,) if isinstance(self.hf, str) else self.hf


@dataclass(frozen=True)
class Experts:
    """Matrices of experts: one per expert, or fused as ``mlp.experts.gate_up_proj`` and ``down_proj``."""

    names: tuple[tuple[str, str], ...]  # GGUF name, format of the checkpoint's with {} for the expert
    router: Tensor
    shared: tuple[Tensor, ...] = ()
    dense: tuple[Tensor, ...] = ()  # of layers without experts


def _nothing(config: Config, sizes: Sizes) -> Metadata:
    return {}


@dataclass(frozen=True)
class Family:
    """One architecture.

    `layer` are the tensors of every layer, `mlp` those of its feed-forward part or the experts. `turned`:
    in the GGUF of this architecture rows of Q and K are ordered so that RoPE turns neighbours. `norm_offset`
    is added to the norms' weights. `extra` gives the metadata that only this family has, or refuses.
    """

    arch: str
    layer: tuple[Tensor, ...]
    mlp: tuple[Tensor, ...] | Experts
    turned: bool = False
    norm_offset: float = 0.0
    activations: tuple[str, ...] = ("silu",)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)  # common name of a field -> the config's
    extra: Callable[[Config, Sizes], Metadata] = _nothing
    layer_prefix: str = "model.layers.{}."
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    may_be_yarn: bool = True
    two_ropes: bool = False  # layers with a window turn in a way of their own


def _attention(bias: Bias = "none", output_bias: Bias = "none") -> tuple[Tensor, ...]:
    return (
        Tensor("self_attn.q_proj", "attn_q", ("q", "embd"), bias, heads="n_head"),
        Tensor("self_attn.k_proj", "attn_k", ("kv", "embd"), bias, heads="n_head_kv"),
        Tensor("self_attn.v_proj", "attn_v", ("kv", "embd"), bias),
        Tensor("self_attn.o_proj", "attn_output", ("embd", "q"), output_bias),
    )


def _mlp(bias: Bias = "none") -> tuple[Tensor, ...]:
    return (
        Tensor("mlp.gate_proj", "ffn_gate", ("ff", "embd"), bias),
        Tensor("mlp.up_proj", "ffn_up", ("ff", "embd"), bias),
        Tensor("mlp.down_proj", "ffn_down", ("embd", "ff"), bias),
    )


_PRE_NORMS = (
    Tensor("input_layernorm", "attn_norm", ("embd",)),
    Tensor("post_attention_layernorm", "ffn_norm", ("embd",)),
)
_POST_NORMS = (
    Tensor("post_attention_layernorm", "post_attention_norm", ("embd",)),
    Tensor("post_feedforward_layernorm", "post_ffw_norm", ("embd",)),
)
_FOUR_NORMS = (
    Tensor("input_layernorm", "attn_norm", ("embd",)),
    Tensor("pre_feedforward_layernorm", "ffn_norm", ("embd",)),
    *_POST_NORMS,
)
_HEAD_NORMS = (
    Tensor("self_attn.q_norm", "attn_q_norm", ("head_dim",)),
    Tensor("self_attn.k_norm", "attn_k_norm", ("head_dim",)),
)
_WIDE_NORMS = (
    Tensor("self_attn.q_norm", "attn_q_norm", ("q",)),
    Tensor("self_attn.k_norm", "attn_k_norm", ("kv",)),
)


def _experts(block: str, gate: str, up: str, down: str, **rest: Any) -> Experts:
    return Experts(
        names=(
            ("ffn_gate_exps", f"{block}.experts.{{}}.{gate}"),
            ("ffn_up_exps", f"{block}.experts.{{}}.{up}"),
            ("ffn_down_exps", f"{block}.experts.{{}}.{down}"),
        ),
        router=Tensor((f"{block}.gate", "mlp.gate"), "ffn_gate_inp", ("experts", "embd"), exact=True),
        **rest,
    )


_SHARED_EXPERT = (
    Tensor("mlp.shared_expert.gate_proj", "ffn_gate_shexp", ("shared_ff", "embd")),
    Tensor("mlp.shared_expert.up_proj", "ffn_up_shexp", ("shared_ff", "embd")),
    Tensor("mlp.shared_expert.down_proj", "ffn_down_shexp", ("embd", "shared_ff")),
    # one row, which GGUF has as a vector
    Tensor("mlp.shared_expert_gate", "ffn_gate_inp_shexp", ("one", "embd"), exact=True),
)

FUSED_GATE_UP = "mlp.experts.gate_up_proj"
FUSED_DOWN = "mlp.experts.down_proj"


_LLAMA = Family(
    arch="llama",
    layer=(*_attention("optional", "optional"), *_PRE_NORMS),
    mlp=_mlp("optional"),
    turned=True,
    defaults={"rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu"},
)
_GEMMA_DEFAULTS = {
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
}
_GELU = ("gelu_pytorch_tanh", "gelu_new")
_QWEN2_DEFAULTS = {"rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu"}
_GEMMA3 = Family(
    arch="gemma3",
    layer=(*_attention(), *_FOUR_NORMS, *_HEAD_NORMS),
    mlp=_mlp(),
    norm_offset=1.0,
    activations=_GELU,
    defaults={
        **_GEMMA_DEFAULTS,
        "rope_theta": 1000000.0,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000.0,
    },
    extra=hyperparameters.gemma3,
    may_be_yarn=False,
    two_ropes=True,
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": Family(
        arch="llama",
        layer=(*_attention(), *_PRE_NORMS),
        mlp=_mlp(),
        turned=True,
        defaults=_LLAMA.defaults,
        extra=hyperparameters.mistral,
    ),
    "MixtralForCausalLM": Family(
        arch="llama",
        layer=(*_attention(), *_PRE_NORMS),
        mlp=_experts("block_sparse_moe", "w1", "w3", "w2"),
        turned=True,
        defaults={
            **_LLAMA.defaults,
            "rope_theta": 1000000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        extra=hyperparameters.mixtral,
    ),
    "Qwen2ForCausalLM": Family(
        arch="qwen2",
        layer=(*_attention("required"), *_PRE_NORMS),
        mlp=_mlp(),
        defaults=_QWEN2_DEFAULTS,
        extra=hyperparameters.no_window,
    ),
    "Qwen3ForCausalLM": Family(
        arch="qwen3",
        layer=(*_attention(), *_PRE_NORMS, *_HEAD_NORMS),
        mlp=_mlp(),
        defaults={**_QWEN2_DEFAULTS, "head_dim": 128},
        extra=hyperparameters.no_window,
    ),
    "QWenLMHeadModel": Family(
        arch="qwen",
        layer=(
            Tensor("ln_1", "attn_norm", ("embd",)),
            Tensor("attn.c_attn", "attn_qkv", ("qkv", "embd"), "required"),
            Tensor("attn.c_proj", "attn_output", ("embd", "q")),
            Tensor("ln_2", "ffn_norm", ("embd",)),
        ),
        mlp=(
            Tensor("mlp.w2", "ffn_gate", ("half_ff", "embd")),
            Tensor("mlp.w1", "ffn_up", ("half_ff", "embd")),
            Tensor("mlp.c_proj", "ffn_down", ("embd", "half_ff")),
        ),
        defaults={
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "rope_theta": 10000.0,
            "rotary_pct": 1.0,
            "no_bias": True,
        },
        aliases={"rope_theta": "rotary_emb_base", "rms_norm_eps": "layer_norm_epsilon"},
        extra=hyperparameters.qwen,
        layer_prefix="transformer.h.{}.",
        embedding="transformer.wte",
        norm="transformer.ln_f",
    ),
    "Phi3ForCausalLM": Family(
        arch="phi3",
        layer=(
            *_PRE_NORMS,
            Tensor("self_attn.qkv_proj", "attn_qkv", ("qkv", "embd")),
            Tensor("self_attn.o_proj", "attn_output", ("embd", "q")),
        ),
        mlp=(
            Tensor("mlp.gate_up_proj", "ffn_up", ("two_ff", "embd")),
            Tensor("mlp.down_proj", "ffn_down", ("embd", "ff")),
        ),
        defaults=_LLAMA.defaults,
        extra=hyperparameters.mistral,
        may_be_yarn=False,
    ),
    "GemmaForCausalLM": Family(
        arch="gemma",
        layer=(*_attention(), *_PRE_NORMS),
        mlp=_mlp(),
        norm_offset=1.0,
        activations=(*_GELU, "gelu"),  # the first files say gelu and mean tanh
        defaults=_GEMMA_DEFAULTS,
        extra=hyperparameters.gemma,
    ),
    "Gemma2ForCausalLM": Family(
        arch="gemma2",
        layer=(*_attention(), *_FOUR_NORMS),
        mlp=_mlp(),
        norm_offset=1.0,
        activations=_GELU,
        defaults={
            **_GEMMA_DEFAULTS,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        extra=hyperparameters.gemma2,
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "GraniteForCausalLM": Family(
        arch="granite",
        layer=(*_attention("optional", "optional"), *_PRE_NORMS),
        mlp=_mlp("optional"),
        turned=True,
        defaults={
            **_LLAMA.defaults,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        extra=hyperparameters.granite,
    ),
    "Olmo2ForCausalLM": Family(
        arch="olmo2",
        layer=(*_attention(), *_POST_NORMS, *_WIDE_NORMS),
        mlp=_mlp(),
        defaults=_LLAMA.defaults,
    ),
    "Olmo3ForCausalLM": Family(
        arch="olmo2",
        layer=(*_attention(), *_POST_NORMS, *_WIDE_NORMS),
        mlp=_mlp(),
        defaults={**_LLAMA.defaults, "rope_theta": 500000.0, "sliding_window_pattern": 4},
        extra=hyperparameters.olmo3,
        two_ropes=True,
    ),
    "SmolLM3ForCausalLM": Family(
        arch="smollm3",
        layer=(*_attention("optional", "optional"), *_PRE_NORMS),
        mlp=_mlp("optional"),
        turned=True,
        defaults={
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "no_rope_layer_interval": 4,
        },
        extra=hyperparameters.smollm3,
    ),
    "Qwen2MoeForCausalLM": Family(
        arch="qwen2moe",
        layer=(*_attention("required"), *_PRE_NORMS),
        mlp=_experts("mlp", "gate_proj", "up_proj", "down_proj", shared=_SHARED_EXPERT, dense=_mlp()),
        defaults={**_QWEN2_DEFAULTS, "norm_topk_prob": False},
        extra=hyperparameters.qwen_moe,
    ),
    "Qwen3MoeForCausalLM": Family(
        arch="qwen3moe",
        layer=(*_attention(), *_PRE_NORMS, *_HEAD_NORMS),
        mlp=_experts("mlp", "gate_proj", "up_proj", "down_proj", dense=_mlp()),
        defaults={**_QWEN2_DEFAULTS, "norm_topk_prob": False},
        extra=hyperparameters.qwen_moe,
    ),
}
