"""A small GPT: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU. Attention is a choice."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash3


@dataclass(frozen=True)
class Documents:
    """Where documents lie in tokens (b, s): none crosses a row, and together they are all of them."""

    ends: torch.Tensor  # (documents + 1,) int32, of the rows one after the other: 0, then each end
    number: torch.Tensor  # (b, s) int64: which document a token is in
    positions: torch.Tensor  # (b, s) int64, in the document


def flash3_attention(q, k, v, documents: Documents | None = None, window: int | None = None):
    """The whole integration: q (b, s, heads, d), k and v (b, s, kv_heads, d) -> (b, s, heads, d).

    A token sees itself and what is before it, in its document and `window` tokens back at most.
    """
    mask = {"causal": True, "window_size": (-1 if window is None else window, 0)}
    if documents is None:
        return flash3.flash_attn_func(q, k, v, **mask)
    packed = (x.flatten(0, 1) for x in (q, k, v))
    ends, longest = documents.ends, q.shape[1]
    out = flash3.flash_attn_varlen_func(*packed, ends, ends, longest, longest, **mask)
    return out.view(q.shape)


def fp8_attention(q, k, v, documents: Documents | None = None, window: int | None = None):
    """Forward in float8, quantised on the way; backward in 16 bits."""
    if documents is not None or window is not None:
        raise NotImplementedError("attention in float8 has no packed documents and no windows")
    return flash3.flash_attn_fp8_func(q, k, v, causal=True)


def sdpa_attention(q, k, v, documents: Documents | None = None, window: int | None = None):
    """torch's fused kernels, whichever it picks for the machine; documents and windows as a mask."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = {"is_causal": True}
    if documents is not None or window is not None:
        i = torch.arange(q.shape[2], device=q.device)[:, None]
        visible = (i >= i.T) & (i - i.T <= (len(i) if window is None else window))
        if documents is not None:
            visible = visible & (documents.number[:, :, None] == documents.number[:, None])
            visible = visible[:, None]
        mask = {"attn_mask": visible}
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **mask)
    return out.transpose(1, 2)


def math_attention(q, k, v, documents: Documents | None = None, window: int | None = None):
    """torch's unfused path: it stores the scores, memory grows with context squared."""
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa_attention(q, k, v, documents, window)


ATTENTIONS = {
    "flash3": flash3_attention,
    "flash3-fp8": fp8_attention,
    "sdpa": sdpa_attention,
    "math": math_attention,
}


@dataclass(frozen=True)
class GPTConfig:
    vocabulary: int
    context: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def mlp_width(self) -> int:
        return 64 * round(self.width * 8 / 3 / 64)  # as many weights as a plain MLP of 4 widths


def rotary_table(context: int, head_dim: int) -> torch.Tensor:
    """Angles (RoFormer, arXiv 2104.09864): (2, context, 1, head_dim / 2) fp32, cosine and sine."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(context), frequencies)[:, None, :]
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (x[i], x[i + d/2]) of each head: (b, s, heads, d), x's dtype.

    table: (2, s, 1, d / 2) or (2, b, s, 1, d / 2), the rows of rotary_table for the positions of x.
    """
    cosine, sine = table
    first, second = x.float().chunk(2, dim=-1)
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat(rotated, dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, attention) -> None:
        super().__init__()
        self.config, self.attention = config, attention
        kv_width = config.kv_heads * config.head_dim
        self.qkv = nn.Linear(config.width, config.width + 2 * kv_width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(
        self, x: torch.Tensor, table: torch.Tensor, documents: Documents | None
    ) -> torch.Tensor:
        config = self.config
        heads = self.qkv(x).unflatten(-1, (-1, config.head_dim))
        q, k, v = heads.split([config.heads, config.kv_heads, config.kv_heads], dim=2)
        known = () if documents is None else (documents,)
        attended = self.attention(rotate(q, table), rotate(k, table), v, *known)
        return self.out(attended.flatten(2))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, attention) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.attention, self.mlp = Attention(config, attention), MLP(config)

    def forward(
        self, x: torch.Tensor, table: torch.Tensor, documents: Documents | None
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), table, documents)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Bytes (b, s) int64 -> logits (b, s, vocabulary). Weights are fp32, run it under autocast.

    attention: one of ATTENTIONS, or another function of q, k and v, and of documents if it gets them.
    """

    def __init__(self, config: GPTConfig, attention: Callable) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        blocks = (Block(config, attention) for _ in range(config.layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.register_buffer("table", rotary_table(config.context, config.head_dim), False)
        self.apply(self.initialise)
        for name, weight in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):  # keeps the residual stream's variance
                nn.init.normal_(weight, std=0.02 / (2 * config.layers) ** 0.5)

    @staticmethod
    def initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def use_attention(self, attention: Callable) -> None:
        """The same weights with another function."""
        for block in self.blocks:
            block.attention.attention = attention

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        documents: Documents | None = None,
    ) -> torch.Tensor:
        """positions: (s,) int64, where the tokens lie in their sequence; None is 0 ... s - 1.

        documents: tokens see nothing of other documents, and positions are those in the document.
        """
        if documents is not None:
            positions = documents.positions
        table = self.table[:, slice(tokens.shape[1]) if positions is None else positions]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, table, documents)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, prompt: torch.Tensor, length: int, generator: torch.Generator):
        """Appends `length` sampled bytes to prompt (1, s): (1, s + length). Top 40, temperature 0.8."""
        tokens = prompt
        for _ in range(length):
            logits = self(tokens[:, -self.config.context :])[0, -1].float().cpu()
            best = logits.topk(40)
            chosen = torch.multinomial((best.values / 0.8).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, best.indices[chosen][None].to(tokens.device)], dim=1)
        return tokens
