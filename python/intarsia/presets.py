"""The MoE layers of public models, and the shapes that are benchmarked: sizes, routing, activation, layout.

Figures are those of each model's published configuration (`source` says which). The second group holds the shapes on
which other implementations were measured (see `intarsia.memory`): softmax, then top-k, SwiGLU, nothing shared.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One MoE layer. H = hidden, I = width, E = experts, K = experts_per_token, T = tokens."""

    name: str
    hidden: int
    width: int
    experts: int
    experts_per_token: int
    tokens: int | None = None  # the benchmark's T
    scores: str = "softmax_renorm"  # router family: softmax_renorm (A), softmax (B), sigmoid_group (C), sigmoid (D)
    activation: str = "swiglu"
    groups: int = 1  # sigmoid_group: experts are cut into so many groups,
    top_groups: int = 1  # of which so many stay
    scale: float = 1.0  # sigmoid_group: factor of the scores
    renormalise: bool = True  # sigmoid_group: scores over their sum
    score_on: str = "output"
    bias: bool = False  # per-expert biases of both projections
    router_bias: bool = False
    layout: str = "concatenated"  # rows of w_up: [gate; up] halves, or "interleaved"
    shared_width: int = 0  # width of the shared expert; 0: none
    shared_gated: bool = False  # its output times sigmoid(x w^T)
    source: str


_MODELS = (
    Preset(name="mixtral-8x7b", hidden=4096, width=14336, experts=8, experts_per_token=2,
           source="mistralai/Mixtral-8x7B-v0.1, config.json"),
    Preset(name="olmoe-1b-7b", hidden=2048, width=1024, experts=64, experts_per_token=8, scores="softmax",
           source="allenai/OLMoE-1B-7B-0924, config.json (norm_topk_prob false)"),
    Preset(name="qwen3-30b-a3b", hidden=2048, width=768, experts=128, experts_per_token=8,
           source="Qwen/Qwen3-30B-A3B, config.json (norm_topk_prob true)"),
    Preset(name="qwen3-235b-a22b", hidden=4096, width=1536, experts=128, experts_per_token=8,
           source="Qwen/Qwen3-235B-A22B, config.json (norm_topk_prob true)"),
    Preset(name="qwen3-next-80b-a3b", hidden=2048, width=512, experts=512, experts_per_token=10, shared_width=512,
           shared_gated=True, source="Qwen/Qwen3-Next-80B-A3B-Instruct, config.json"),
    Preset(name="deepseek-v3", hidden=7168, width=2048, experts=256, experts_per_token=8, scores="sigmoid_group",
           groups=8, top_groups=4, scale=2.5, shared_width=2048, source="deepseek-ai/DeepSeek-V3, config.json"),
    Preset(name="gpt-oss-20b", hidden=2880, width=2880, experts=32, experts_per_token=4, activation="clamped_swiglu",
           bias=True, router_bias=True, layout="interleaved", source="openai/gpt-oss-20b, config.json"),
    Preset(name="gpt-oss-120b", hidden=2880, width=2880, experts=128, experts_per_token=4, activation="clamped_swiglu",
           bias=True, router_bias=True, layout="interleaved", source="openai/gpt-oss-120b, config.json"),
    Preset(name="granite-1b-a400m", hidden=1024, width=512, experts=32, experts_per_token=8,
           source="ibm-granite/granite-3.1-1b-a400m-base, config.json"),
    Preset(name="granite-3b-a800m", hidden=1536, width=512, experts=40, experts_per_token=8,
           source="ibm-granite/granite-3.1-3b-a800m-base, config.json"),
    Preset(name="llama-4-scout", hidden=5120, width=8192, experts=16, experts_per_token=1, scores="sigmoid",
           score_on="input", shared_width=8192, source="meta-llama/Llama-4-Scout-17B-16E, config.json"),
    Preset(name="qwen1.5-moe-a2.7b", hidden=2048, width=1408, experts=60, experts_per_token=4, scores="softmax",
           shared_width=5632, shared_gated=True, source="Qwen/Qwen1.5-MoE-A2.7B, config.json (norm_topk_prob false)"),
)  # fmt: skip

# name: (T, H, I, E, K)
_BENCHMARKS = {
    "sonic-7b": (24576, 1536, 256, 128, 8),
    "olmoe": (32768, 2048, 1024, 64, 8),
    "qwen3-30b": (32768, 2048, 768, 128, 8),
    "sonic-120b": (32768, 4096, 1024, 128, 8),
    "mixtral": (16384, 4096, 14336, 8, 2),
    "dsv3": (16384, 7168, 2048, 64, 8),
    "blaze-conf1": (65536, 512, 2048, 4, 1),
    "blaze-conf2": (65536, 1024, 4096, 8, 2),
    "blaze-conf3": (65536, 1024, 4096, 16, 4),
    "blaze-conf4": (32768, 2048, 8192, 16, 4),
    "blaze-conf5": (32768, 512, 2048, 16, 4),
    "blaze-conf6": (16384, 1024, 4096, 16, 4),
    "blaze-conf7": (8192, 2048, 8192, 8, 4),
    "sonic-1.4b": (40960, 768, 256, 128, 8),
    "sonic-30b": (32768, 4096, 256, 256, 16),
    "qwen3-next": (32768, 2048, 512, 512, 10),
    "gpt-oss": (32768, 2880, 2880, 32, 4),
}


def _benchmark(name: str) -> Preset:
    T, H, I, E, K = _BENCHMARKS[name]
    paper = "MoEBlaze, arXiv 2601.05296" if name.startswith("blaze") else "after SonicMoE, arXiv 2512.14080"
    return Preset(
        name=name, tokens=T, hidden=H, width=I, experts=E, experts_per_token=K, scores="softmax",
        source=f"benchmark shape ({paper})",
    )  # fmt: skip


#: Every preset by its name, models first.
PRESETS: dict[str, Preset] = {p.name: p for p in (*_MODELS, *map(_benchmark, _BENCHMARKS))}


def get_preset(name: str) -> Preset:
    """The preset called `name`; ValueError lists the names."""
    if name not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}; got {name!r}")
    return PRESETS[name]
