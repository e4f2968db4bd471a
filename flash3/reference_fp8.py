"""Float8: how values are quantised and what attention of quantised tensors is, in plain PyTorch.

The specification of the quantiser kernels and of ``flash3::fp8_fwd``, whose CPU implementation it is. e4m3 is
float8_e4m3fn: 4 bits of exponent, 3 of mantissa, largest value 448, no infinity. A *descale* is what a stored value is
multiplied by to get back what it stands for.

The quantiser rounds only where it is said here, in float32, in this order, so that kernel and specification agree bit
for bit: rotary embedding, signs, Hadamard transform, amax, one multiplication, e4m3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flash3 import reference

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# Below this a block's descale would leave float32's normal numbers, before or after the Hadamard factor of 1/16.
MIN_AMAX = E4M3_MAX * 2.0**-122
KEY_TILE = 128  # the transposed layout of v ends at a multiple of it

# Granularities of scales, as the operator knows them.
BLOCK, HEAD, TENSOR = 0, 1, 2

# The transposed layout of v, inside groups of 16: which key lies in a place, which dimension in a row. It is the order
# in which the tensor cores hand out P, so that the kernel's registers are the operand of P V as they are.
KEY_OF_PLACE = tuple(8 * (p >> 1 & 1) + 2 * (p >> 2) + (p & 1) for p in range(16))
DIM_OF_ROW = tuple(2 * (r % 8) + r // 8 for r in range(16))


def hadamard_block(head_dim: int) -> int:
    """Elements that one Hadamard transform mixes: the largest power of two that divides head_dim."""
    return head_dim & -head_dim


def hadamard_signs(seed: int, head_dim: int, device: torch.device | None = None) -> Tensor:
    """The random signs, float32 (head_dim), 1 or -1. Bit i % 64 of the (i // 64)th number of splitmix64(seed)."""
    mask = 2**64 - 1
    signs = []
    for word in range(1, 5):
        z = seed + word * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        z ^= z >> 31
        signs += [-1.0 if z >> bit & 1 else 1.0 for bit in range(64)]
    return torch.tensor(signs[:head_dim], device=device)


def hadamard(x: Tensor, block: int) -> Tensor:
    """Sums and differences of x (..., d) in blocks of ``block``, a power of two; not divided by block ** 0.5.

    Element pairs at distance 1, then 2, 4 and so on: the order of the kernel's sums.
    """
    shape, distance = x.shape, 1
    while distance < block:
        low, high = x.reshape(*shape[:-1], shape[-1] // (2 * distance), 2, distance).unbind(-2)
        x = torch.stack((low + high, low - high), -2).reshape(shape)
        distance *= 2
    return x


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates the first 2 * cos.shape[1] dimensions of x (b, s, h, d) float32; row i by cos[i], sin[i].

    Pairs are (x[i], x[i + half]) or, interleaved, (x[2i], x[2i + 1]), as ``flash_attn``'s apply_rotary has them.
    """
    cos, sin = (table.float().unsqueeze(1) for table in (cos, sin))  # (s, 1, half)
    width = 2 * cos.shape[-1]
    rotated, rest = x[..., :width], x[..., width:]
    first, second = (
        (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    )
    pair = first * cos - second * sin, first * sin + second * cos
    rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((rotated, rest), -1)


def rotate(
    x: Tensor, tables: tuple[Tensor, Tensor] | None, interleaved: bool, seed: int | None
) -> tuple[Tensor, float]:
    """x (b, s, h, d) in float32 after rotary embedding and, with a seed, signs and Hadamard transform.

    Returns (y, factor): y * factor is what the rotations, which keep lengths, give.
    """
    y = x.float()
    if tables is not None:
        y = rotary(y, *tables, interleaved)
    if seed is None:
        return y, 1.0
    block = hadamard_block(x.shape[-1])
    return hadamard(y * hadamard_signs(seed, x.shape[-1], x.device), block), block**-0.5


def finite_amax(y: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Largest absolute value over ``dims`` of what is finite; 0 where there is nothing."""
    if any(y.shape[dim] == 0 for dim in dims):
        return y.sum(dims)
    return torch.where(y.isfinite(), y.abs(), 0.0).amax(dims)


def scales(amax: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """(scale, descale) of float32 amax: y * scale fits e4m3, and e4m3 * descale is y * factor. Both 1 for amax 0."""
    zero, amax = amax == 0, amax.clamp(min=MIN_AMAX)
    # Tensors, not numbers: torch would multiply by a reciprocal in places, and round twice.
    largest, factors = torch.full_like(amax, E4M3_MAX), torch.full_like(amax, factor)
    scale, descale = largest / amax, amax * factors / largest
    return scale.masked_fill(zero, 1.0), descale.masked_fill(zero, 1.0)


def quantize(
    x: Tensor,
    num_heads_kv: int,
    granularity: int,
    block: int,
    tables: tuple[Tensor, Tensor] | None = None,
    interleaved: bool = False,
    seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    """x (b, s, h, d) -> e4m3 of its shape, and descale.

    NaN and infinity become NaN and do not count in amax. Scales are

        BLOCK   (b, h, ceil(s / block)): one for ``block`` rows of a head
        HEAD    (b, num_heads_kv): one for the heads that share a key/value head
        TENSOR  (1,)
    """
    y, factor = rotate(x, tables, interleaved, seed)
    batch, seqlen, heads, head_dim = y.shape
    if granularity == TENSOR:
        scale, descale = scales(finite_amax(y, (0, 1, 2, 3)).reshape(1), factor)
        spread = scale.reshape(1, 1, 1, 1)
    elif granularity == HEAD:
        grouped = y.unflatten(2, (num_heads_kv, heads // num_heads_kv))
        scale, descale = scales(finite_amax(grouped, (1, 3, 4)), factor)
        spread = scale.repeat_interleave(heads // num_heads_kv, 1)[:, None, :, None]
    else:
        blocks = -(-seqlen // block)
        padded = y.new_zeros(batch, blocks * block, heads, head_dim)
        padded[:, :seqlen] = y
        scale, descale = scales(
            finite_amax(padded.unflatten(1, (blocks, block)), (2, 4)).transpose(1, 2), factor
        )
        spread = scale.transpose(1, 2).repeat_interleave(block, 1)[:, :seqlen, :, None]
        descale = descale.contiguous()
    # Some versions of torch turn infinity into 448.
    return (y * spread).masked_fill(y.isinf(), math.nan).to(E4M3), descale


def transpose_values(v: Tensor) -> Tensor:
    """The transposed layout of v (b, s, h, d) e4m3: (b, h, d, ceil(s / 128) * 128), permuted, 0 behind s."""
    batch, seqlen, heads, head_dim = v.shape
    padded = v.new_zeros(
        batch, heads, head_dim, -(-seqlen // KEY_TILE) * KEY_TILE, dtype=torch.uint8
    )
    padded[..., :seqlen] = v.view(torch.uint8).permute(0, 2, 3, 1)
    keys = _transposed_order(padded.shape[3], KEY_OF_PLACE, v.device)
    dims = _transposed_order(head_dim, DIM_OF_ROW, v.device)
    return padded[:, :, dims.unsqueeze(1), keys].view(E4M3)


def natural_values(transposed: Tensor, seqlen: int) -> Tensor:
    """The inverse of :func:`transpose_values`."""
    _, _, head_dim, length = transposed.shape
    keys = _transposed_order(length, KEY_OF_PLACE, transposed.device)
    dims = _transposed_order(head_dim, DIM_OF_ROW, transposed.device)
    natural = torch.empty_like(transposed.view(torch.uint8), memory_format=torch.contiguous_format)
    natural[:, :, dims.unsqueeze(1), keys] = transposed.view(torch.uint8)
    return natural.permute(0, 3, 1, 2)[:, :seqlen].contiguous().view(E4M3)


def _transposed_order(extent: int, order: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.arange(extent, device=device).reshape(-1, 16)[:, list(order)].flatten()


def dequantize(x: Tensor, descale: Tensor | None, block: int) -> Tensor:
    """x (b, s, h, d) e4m3 in float32, times descale (b, h, ceil(s / block))."""
    if descale is None:
        return x.float()
    rows = descale.transpose(1, 2).repeat_interleave(block, 1)[:, : x.shape[1]]
    return x.float() * rows.unsqueeze(-1)


def fp8_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    q_block: int,
    k_block: int,
    v_block: int,
    softmax_scale: float,
    v_scale: float,
    causal: bool,
    v_transposed: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Exact attention of the dequantised tensors, in float32.

    Args:
        q (b, sq, hq, d), k, v (b, sk, hk, d): e4m3; v as ``transpose_values`` leaves it if ``v_transposed``.
        q_descale (b, hq, ceil(sq / q_block)), k_descale, v_descale (b, hk, ceil(sk / block)): None is 1.
        v_scale: one more factor of v.

    Returns:
        out: (b, sq, hq, d), out_dtype. lse: (b, hq, sq) float32.
    """
    if v_transposed:
        v = natural_values(v, k.shape[1])
    out, lse = reference.attention_forward(
        dequantize(q, q_descale, q_block),
        dequantize(k, k_descale, k_block),
        dequantize(v, v_descale, v_block) * v_scale,
        softmax_scale,
        causal,
    )
    return out.to(out_dtype), lse
