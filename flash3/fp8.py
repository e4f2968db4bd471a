"""Attention in float8: 16-bit tensors in one call, a quantiser, and attention of what was quantised.

e4m3 is ``torch.float8_e4m3fn``. Descales are float32, and what a stored value is multiplied by to get back what it
stands for. docs/numerics.md has the arithmetic and the errors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flash3 import autograd_fp8, checks, checks_fp8, ops_fp8
from flash3.reference_fp8 import hadamard_signs

__all__ = ["QuantizedQKV", "attention", "flash_attn_fp8_func", "hadamard_signs", "quantize_qkv"]

ROWS = 128  # of a block, for the operator, where a scale does not depend on the row


@dataclass(frozen=True)
class QuantizedQKV:
    """What :func:`quantize_qkv` returns and :func:`attention` takes.

    Attributes:
        q: (batch, seqlen_q, heads_q, head_dim) e4m3. k: (batch, seqlen_k, heads_kv, head_dim) e4m3.
        v: as k; with ``transpose_v`` (batch, heads_kv, head_dim, seqlen_k rounded up to 128) in an order that only
            flash3's kernels know.
        q_descale, k_descale, v_descale: of granularity "block" (batch, heads, ceil(seqlen / block)), "head"
            (batch, heads_kv), "tensor" (1,).
        granularity, block, transpose_v: as they were given.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor
    granularity: str
    block: int
    transpose_v: bool


def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    granularity: str = "block",
    block: int = 128,
    hadamard: bool = True,
    seed: int = 0,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    transpose_v: bool = True,
) -> QuantizedQKV:
    """Quantises q, k and v to e4m3 in one pass over memory, two for scales that are not of blocks.

    Zeros alone have scale 1. NaN and infinity become NaN and have no part in a scale. No gradient.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim) float16 or bfloat16, head_dim a multiple of 16 up to 256.
        k, v: (batch, seqlen_k, heads_kv, head_dim), dtype and device of q; heads_kv divides heads_q.
        granularity: what shares a scale: "block", ``block`` rows of a head; "head", the rows of a key/value head, and
            of all query heads of its group; "tensor", everything.
        block: 64 or 128.
        hadamard: rotate q and k, both in the same way, so that their products stay and outliers are spread out: random
            signs, then an orthonormal Hadamard transform, of the whole head where head_dim is a power of two, otherwise
            of blocks of the largest power of two that divides it (32 for 96, 64 for 192).
        seed: of the signs; the same seed gives the same signs on every device.
        cos, sin: rotary tables (positions, rotary_dim / 2), float32 or of q's dtype, applied to q and k first, rounded
            by nothing. rotary_dim is a multiple of 16 up to head_dim. Row j of k has position j and the last row of q
            that of k's last, as under the causal mask.
        interleaved: rotary pairs are neighbours, and not dimensions i and i + rotary_dim / 2.
        transpose_v: lay v out as the attention kernel wants it, which saves it the transposition.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument that is wrong, named in the message.
        RuntimeError: a GPU that is not Hopper, kernels that are not built, or a CUDA error.

    Source: FlashAttention-3 (Shah et al., 2024), section 3.3.
    """
    checks_fp8.check_16_bit(q, k, v, hadamard)
    checks_fp8.check_block(block)
    checks_fp8.check_seed(seed)
    checks_fp8.check_flag("interleaved", interleaved)
    checks_fp8.check_flag("transpose_v", transpose_v)
    checks_fp8.check_tables(cos, sin, q, k)
    code = checks_fp8.granularity_code(granularity)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise NotImplementedError(
            "q, k, v: quantisation has no gradient, detach them; flash_attn_fp8_func quantises and has one"
        )
    tensors = ops_fp8.quantize_qkv(
        q, k, v, cos, sin, interleaved, code, block, hadamard, seed, transpose_v
    )
    return QuantizedQKV(*tensors, granularity, block, transpose_v)


def attention(
    quantized: QuantizedQKV,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    out_dtype: torch.dtype | None = None,
    promote_every: int = 0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of what :func:`quantize_qkv` made. No gradient.

    Args:
        softmax_scale, causal, return_lse: as in ``flash_attn_func``.
        out_dtype: bfloat16, which None is, or float16.
        promote_every: 1, for head_dim up to 128, adds the tensor cores' sums of P V up in float32 after every step of
            keys, which is more exact for long rows and slower; 0 is never.

    Returns:
        out, or (out, lse): as ``flash_attn_func``.
    """
    if not isinstance(quantized, QuantizedQKV):
        raise TypeError(f"quantized: must be a QuantizedQKV, got {type(quantized).__name__}")
    x = quantized
    checks.check_flags(causal, False)
    scale = _softmax_scale(softmax_scale, x.q.shape[3])
    out_dtype = checks_fp8.check_out_dtype(out_dtype)
    checks_fp8.check_promote_every(promote_every, x.q.shape[3])
    descales = x.q_descale, x.k_descale, x.v_descale
    block = x.block
    if x.granularity != "block":
        pairs = zip(descales, (x.q, x.k, x.k), strict=True)
        descales, block = [_per_block(d, like, x.k.shape[2]) for d, like in pairs], ROWS
    out, lse = ops_fp8.fp8_fwd(
        x.q, x.k, x.v, *descales, block, block, block, scale, 1.0, causal, x.transpose_v, out_dtype,
        promote_every,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    hadamard: bool = True,
    block: int = 128,
    seed: int = 0,
    promote_every: int = 0,
    deterministic: bool = False,
    recompute: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of 16-bit tensors, computed in float8: quantised in blocks of rows, one scale each. Differentiable.

    The gradient is computed by the 16-bit kernels from q, k and v as they are, and from float8's out and lse: right to
    about a percent where scores are of ordinary size, and to no better than the error of lse where they are large
    (docs/numerics.md). ``recompute`` gives the gradient of 16-bit attention.

    Args:
        q, k, v, softmax_scale, causal, deterministic, return_lse: as in ``flash_attn_func``; float16 or bfloat16, on
            CPU too, head_dim a multiple of 16 up to 256, that of v the same.
        hadamard, block, seed: as in :func:`quantize_qkv`.
        promote_every: as in :func:`attention`.
        recompute: let the backward run the 16-bit forward first, for the out and lse that belong to q, k and v as they
            are. Costs its time; out and lse are not kept for the backward then.

    Returns:
        out: (batch, seqlen_q, heads_q, head_dim), contiguous, q's dtype.
        lse: (batch, heads_q, seqlen_q) float32, if asked for: of the scores that float8 gives; differentiable.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as ``flash_attn_func``.

    Source: FlashAttention-3 (Shah et al., 2024), section 3.3, with a backward of our own.
    """
    head_dim = checks_fp8.check_16_bit(q, k, v, hadamard)
    checks.check_flags(causal, deterministic)
    checks_fp8.check_flag("recompute", recompute)
    checks_fp8.check_block(block)
    checks_fp8.check_seed(seed)
    checks_fp8.check_promote_every(promote_every, head_dim)
    scale = _softmax_scale(softmax_scale, head_dim)
    out, lse = autograd_fp8.fp8_attention(
        q, k, v, scale, causal, deterministic, block, hadamard, seed, promote_every, recompute
    )
    return (out, lse) if return_lse else out


def check_no_scales(*values: object) -> None:
    """Raises for float8's own arguments beside tensors of another dtype."""
    if values != (None, None, None, None):
        names = "q_block_descale", "k_block_descale", "v_block_descale", "out_dtype"
        name = next(n for n, value in zip(names, values, strict=True) if value is not None)
        raise TypeError(f"{name}: must be None unless q, k and v are float8_e4m3fn")


def attention_with_descales(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    deterministic: bool,
    descales: tuple,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """``flash_attn_func`` of e4m3 tensors: (out, lse). ``descales``: of q, k, v, then their block descales."""
    head_dim = checks_fp8.check_e4m3(q, k, v)
    checks.check_flags(causal, deterministic)
    causal = checks_fp8.is_causal(causal, window_size)
    out_dtype = checks_fp8.check_out_dtype(out_dtype)
    factors, scales, blocks = [], [], []
    arguments = zip("qkv", (q, k, v), descales[:3], descales[3:], strict=True)
    for name, x, descale, per_block in arguments:
        factor, scale, block = _read_descale(name, x, descale, per_block, k.shape[2])
        factors.append(factor)
        scales.append(scale)
        blocks.append(block)
    scale = _softmax_scale(softmax_scale, head_dim)
    scale = checks_fp8.check_total_scale(
        "softmax_scale, q_descale, k_descale", scale * factors[0] * factors[1]
    )
    inputs = (
        q, k, v, *scales, *blocks, scale, factors[2], causal, False, out_dtype, 0,
    )  # fmt: skip
    return ops_fp8.fp8_fwd(*inputs)


def _read_descale(
    name: str, x: Tensor, descale: object, per_block: Tensor | None, num_heads_kv: int
) -> tuple[float, Tensor | None, int]:
    """(number, tensor for the operator or None, rows of its blocks) of one of q, k and v."""
    if per_block is not None:
        if descale is not None:
            raise ValueError(
                f"{name}_descale, {name}_block_descale: at most one of them can be given"
            )
        argument = f"{name}_block_descale"
        return 1.0, per_block, checks_fp8.block_of(argument, per_block, x)
    argument = f"{name}_descale"
    if descale is None:
        return 1.0, None, ROWS
    if not isinstance(descale, Tensor):
        return checks_fp8.number(argument, descale), None, ROWS
    checks_fp8.check_scale_tensor(argument, descale, x)
    if descale.shape not in ((1,), (x.shape[0], num_heads_kv)):
        checks_fp8.raise_scale_shape(argument, descale.shape, x.shape[0], num_heads_kv)
    return 1.0, _per_block(descale, x, num_heads_kv), ROWS


def _per_block(descale: Tensor, x: Tensor, num_heads_kv: int) -> Tensor:
    """(1,) or (batch, heads_kv) as (batch, heads of x, blocks of x), by strides 0 as far as they reach."""
    batch, seqlen, heads, _ = x.shape
    blocks = -(-seqlen // ROWS)
    if descale.dim() == 1:
        return descale.expand(batch, heads, blocks)
    if heads != num_heads_kv:
        descale = descale.repeat_interleave(heads // num_heads_kv, 1)
    return descale.unsqueeze(2).expand(batch, heads, blocks)


def _softmax_scale(softmax_scale: float | None, head_dim: int) -> float:
    return head_dim**-0.5 if softmax_scale is None else checks.check_scale(softmax_scale)
