"""Predicted tokens per second. Nothing here was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .devices import AGX, NANO, T4, Device
from .tables import table

TOKENS = 1024  # in the cache
BANDWIDTH = 0.8  # of the peak: assumed
GAP = 3e-6  # seconds from one kernel to the next in a graph: assumed
LAUNCHES = 6  # of a layer; the embedding, the head and its top-k come once


@dataclass(frozen=True)
class Model:
    name: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int

    def more_bits(self, layer: int) -> bool:
        """Layers whose attn_v and ffn_down Q4_K_M has in Q6_K: the first and last eighth, and every third."""
        eighth = self.n_layer // 8
        return layer < eighth or layer >= 7 * self.n_layer // 8 or (layer - eighth) % 3 == 2

    def weights(self) -> dict[str, int]:
        """Weights read for a token, by type, as in Q4_K_M files: the head in Q6_K, all else in Q4_K."""
        q, kv = self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        n = {"Q4_K": 0, "Q6_K": self.n_embd * self.n_vocab}
        for layer in range(self.n_layer):
            n["Q4_K"] += self.n_embd * (2 * q + kv + 2 * self.n_ff)
            n["Q6_K" if self.more_bits(layer) else "Q4_K"] += self.n_embd * (kv + self.n_ff)
        return n

    @property
    def kv_rows(self) -> int:
        return self.n_layer * self.n_head_kv * TOKENS


QWEN = Model("Qwen2.5-1.5B", 28, 1536, 12, 2, 128, 8960, 151936)
LLAMA = Model("Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 128256)

NOTHING = "no published figure found"
PUBLISHED = {
    (QWEN.name, NANO.name): "llama.cpp 32.1 [1]",
    (QWEN.name, AGX.name): f"{NOTHING}; Qwen2.5-3B-VL: TensorRT Edge-LLM 71.8 [2]",
    (LLAMA.name, NANO.name): "MLC 19.1 [3]",
    (LLAMA.name, AGX.name): f"{NOTHING}; Llama 2 7B: llama.cpp 22.5 [4], Qwen3 8B: llama.cpp about 25 [5]",
}
SOURCES = (
    "[1] github.com/paiml/realizar, issue 120: Qwen2.5-Coder-1.5B, Q4_K_M, Orin Nano 8GB at 102 GB/s.",
    "[2] github.com/NVIDIA/TensorRT-Edge-LLM, issue 60: a user's W4A16, AGX Orin 64GB.",
    "[3] NVIDIA's blog, Jetson Orin Nano Developer Kit Gets a Super Boost: Llama 3.1 8B, INT4\n"
    "  (as github.com/msmcs-robotics/WayfindR-driver quotes it).",
    "[4] github.com/nvidia-holoscan/holohub, issue 170: 4 bits, integrated GPU of IGX Orin.",
    "[5] github.com/OpenBMB/MiniCPM, issue 331: Q4_K_M, a user's AGX Orin.",
    "TensorRT Edge-LLM's documentation has tables for these Jetsons (Performance Benchmarks, 0.9.1 on);\n"
    "  they are not repeated here.",
)


@dataclass(frozen=True)
class Prediction:
    megabytes: float
    by_bandwidth: float  # tokens a second
    by_issue: float
    tokens: float


def predict(
    device: Device,
    model: Model,
    bytes_per_weight: Mapping[str, float],
    lane_instructions: Mapping[str, float],
    warp_instructions: float,
) -> Prediction:
    """lane_instructions: of a weight, by type. warp_instructions: of a token in the cache and KV head."""
    weights = model.weights()
    n_bytes = sum(n * bytes_per_weight[kind] for kind, n in weights.items())
    n_bytes += model.kv_rows * 2 * (model.head_dim + 2)
    issued = sum(n * lane_instructions[kind] / 32 for kind, n in weights.items())
    issued += model.kv_rows * warp_instructions
    gaps = (LAUNCHES * model.n_layer + 3) * GAP
    moving, issuing = n_bytes / (device.gbps * 1e9 * BANDWIDTH), issued / device.issue
    return Prediction(n_bytes / 1e6, 1 / moving, 1 / issuing, 1 / (max(moving, issuing) + gaps))


def speed_table(
    bytes_per_weight: Mapping[str, float],
    lane_instructions: Mapping[int, Mapping[str, float]],
    warp_instructions: Mapping[int, float],
) -> str:
    """Instructions by architecture, as predict() wants them."""
    rows = []
    for model in (QWEN, LLAMA):
        for device in (NANO, AGX, T4):
            sm = device.arch.sm
            p = predict(device, model, bytes_per_weight, lane_instructions[sm], warp_instructions[sm])
            rows.append(
                (
                    model.name,
                    device.name,
                    f"{p.megabytes:,.0f}",
                    f"{p.by_bandwidth:.1f}",
                    f"{p.by_issue:.0f}",
                    f"**{p.tokens:.1f}**",
                    PUBLISHED.get((model.name, device.name), NOTHING),
                )
            )
    head = ("model", "device", "MB a token", "bandwidth allows", "issue allows", "predicted", "published")
    return table(head, rows, left=2)
