"""A byte-level transformer whose every feed-forward is a Mixture of Experts.

B sequences, S bytes in each, T = B*S tokens, H hidden, N heads, D = H/N.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..layer import MoE, Routing
from .config import TrainConfig

BYTES = 256


def rotate(x_BNSD: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864): pairs (i, i + D/2) turned by position * 10000^(-2i/D)."""
    half = x_BNSD.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half, device=x_BNSD.device) / half)
    angle = torch.arange(x_BNSD.shape[-2], device=x_BNSD.device)[:, None] * rate
    cos, sin = angle.cos().to(x_BNSD.dtype), angle.sin().to(x_BNSD.dtype)
    a, b = x_BNSD[..., :half], x_BNSD[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention, (B, S, H) -> (B, S, H)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        B, S, H = x_BSH.shape
        q, k, v = self.qkv(x_BSH).view(B, S, 3, self.heads, H // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, S, H))


class Block(nn.Module):
    """x + attention, then x + experts, each after an RMSNorm."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        rounded = config.router == "rounded"
        self.attention_norm = nn.RMSNorm(config.hidden)
        self.attention = Attention(config.hidden, config.heads)
        self.expert_norm = nn.RMSNorm(config.hidden)
        self.experts = MoE(
            config.hidden,
            config.width,
            config.experts,
            config.experts_per_token,
            scores="softmax" if rounded else config.router,
            score_on="input" if config.router == "sigmoid" else "output",  # as Llama 4, whose family it is
            save=config.save,
            rounding=config.rounding if rounded else None,
            tile=config.tile,
        )

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, Routing]:
        # Norms in float32, also under autocast. The residual is the addend of the experts' own sum: no further pass.
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH.float()))
        return self.experts(self.expert_norm(x_BSH.float()), addend=x_BSH, return_routing=True)


class ByteTransformer(nn.Module):
    """Bytes (B, S) int64 -> logits (B, S, 256) of each next byte, and what the router of each block decided."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, BYTES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.5)
        nn.init.zeros_(self.head.weight)  # so that the untrained model gives every byte the same 8 bits
        for block in self.blocks:
            nn.init.zeros_(block.attention.out.weight)

    def forward(self, bytes_BS: Tensor) -> tuple[Tensor, list[Routing]]:
        x_BSH, routings = self.embedding(bytes_BS), []
        for block in self.blocks:
            x_BSH, routing = block(x_BSH)
            routings.append(routing)
        return self.head(self.norm(x_BSH.float())), routings

    def parameters_of(self) -> tuple[int, int]:
        """Numbers of parameters: all, and those that one byte uses."""
        everything = sum(p.numel() for p in self.parameters())
        idle = 0
        for block in self.blocks:
            moe = block.experts
            idle += (moe.w_up.numel() + moe.w_down.numel()) * (moe.experts - moe.experts_per_token) // moe.experts
        return everything, everything - idle
