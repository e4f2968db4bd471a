"""The user's functions. Names, order and defaults of the parameters are FlashAttention-3's."""

from __future__ import annotations

import torch
from torch import Tensor

from flash3 import autograd, checks, checks_fp8, fp8, padded
from flash3.checks_options import NO_WINDOW, check_options


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    qv: Tensor | None = None, q_descale: Tensor | float | None = None, k_descale: Tensor | float | None = None,
    v_descale: Tensor | float | None = None, window_size: tuple[int, int] = NO_WINDOW, attention_chunk: int = 0,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    sm_margin: int = 0, return_attn_probs: bool = False, *, learnable_sink: Tensor | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, batch_invariant: bool = False,
    return_lse: bool = False, q_block_descale: Tensor | None = None, k_block_descale: Tensor | None = None,
    v_block_descale: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Exact attention softmax(softmax_scale * Q K^T) V, differentiable in q, k and v.

    Any strides are accepted. A query row that sees no key gives out = 0, lse = -inf (or its sink) and zero gradients;
    lengths and batch may be 0. The forward is bitwise reproducible; the backward is with ``deterministic=True``.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), head_dim a multiple of 8 up to 256. float16 or bfloat16 on a Hopper
            GPU; on CPU, where the reference implementation computes, float32 and float64 too. float8_e4m3fn on both,
            without gradient, head_dim a multiple of 16 (``flash3.fp8``).
        k: (batch, seqlen_k, heads_kv, head_dim), dtype and device of q; heads_kv divides heads_q, and query head i uses
            key/value head i // (heads_q / heads_kv).
        v: (batch, seqlen_k, heads_kv, head_dim_v), likewise; head_dim_v a multiple of 8 up to 256 of its own.
        softmax_scale: positive factor of the scores; None is head_dim ** -0.5.
        causal: query i sees key j if j <= i + seqlen_k - seqlen_q (bottom-right aligned).
        qv, sm_margin: not supported yet, must be None and 0.
        q_descale, k_descale, v_descale: of float8_e4m3fn inputs, what their values are multiplied by: a number, or a
            float32 tensor of shape (1,) or (batch, heads_kv). None is 1.
        window_size: (left, right): query i sees key j if p - left <= j <= p + right, where p = i + seqlen_k - seqlen_q;
            -1 is unbounded. Right is 0 at most where causal, and (-1, 0) is causal.
        attention_chunk: c > 0 lets query i see key j only if j // c == p // c: keys of its own chunk. 0 is none.
        softcap: c > 0 turns a scaled score s into c * tanh(s / c). 0.0 is none.
        num_splits: 1, or 0 to let the library choose (it chooses 1).
        pack_gqa: a hint. None or False; packing is not supported yet.
        deterministic: bitwise equal gradients over repeated runs, slower.
        return_attn_probs: FlashAttention-3's name of ``return_lse``; probabilities are never returned.
        learnable_sink: (heads_q), q's dtype or float32, differentiable: one more logit for each query row of a head,
            neither scaled nor capped, that takes its part of the softmax and adds no value. None is none.
        seqused_q, seqused_k: (batch) int32 on q's device: how many rows, from the first on, each sequence uses; None is
            all. They count as its length, the others as in ``flash_attn_varlen_func``.
        batch_invariant: on a GPU, a sequence's results are bitwise those that it has in any other batch; its gradients
            too, which are then deterministic.
        return_lse: return (out, lse).
        q_block_descale, k_block_descale, v_block_descale: in place of a descale one for each block of 64 or 128 rows,
            float32 (batch, heads, ceil(seqlen / 64 or 128)); the shape says which.
        out_dtype: of float8_e4m3fn inputs: bfloat16, which None is, or float16.

    Returns:
        out: (batch, seqlen_q, heads_q, head_dim_v), contiguous, q's dtype or out_dtype.
        lse: (batch, heads_q, seqlen_q), if asked for: log-sum-exp of the scores, as scaled and capped, and of the sink;
            natural log, float32 (float64 for float64 inputs), differentiable.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument that is wrong or not supported, named in the message.
        RuntimeError: a GPU that is not Hopper, kernels that are not built, or a CUDA error.

    Source: FlashAttention-3 (Shah et al., 2024), section 3; the lse gradient is derived in ``flash3.reference``.
    """
    if getattr(q, "dtype", None) is torch.float8_e4m3fn:
        checks.check_unsupported(qv, None, None, None, num_splits, pack_gqa, sm_margin)
        checks_fp8.check_options(
            attention_chunk, softcap, learnable_sink, seqused_q, seqused_k, batch_invariant
        )
        descales = (
            q_descale, k_descale, v_descale, q_block_descale, k_block_descale, v_block_descale,
        )  # fmt: skip
        out, lse = fp8.attention_with_descales(
            q, k, v, softmax_scale, causal, window_size, deterministic, descales, out_dtype
        )
        return (out, lse) if return_lse or return_attn_probs else out
    fp8.check_no_scales(q_block_descale, k_block_descale, v_block_descale, out_dtype)
    checks.check_unsupported(qv, q_descale, k_descale, v_descale, num_splits, pack_gqa, sm_margin)
    checks.check_tensors(q, k, v)
    flags = causal, deterministic, batch_invariant
    scores = window_size, attention_chunk, softcap, learnable_sink
    options = check_options((q, k, v), softmax_scale, *flags, *scores)
    if seqused_q is None and seqused_k is None:
        out, lse = autograd.attention(q, k, v, *options)
    else:
        out, lse = padded.attention(q, k, v, seqused_q, seqused_k, *options)
    return (out, lse) if return_lse or return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    seqused: Tensor | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flash_attn_func` of one tensor that holds q, k and v, as a projection leaves them. Nothing is copied.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim); or, with ``num_heads_q``, (batch, seqlen, heads, head_dim) with the
            heads of q first, then those of k, then as many of v.
        num_heads_q: the number of q's heads in a qkv of four dimensions.
        seqused: seqused_q and seqused_k of ``flash_attn_func`` in one.
        others: as in ``flash_attn_func``.

    Returns:
        out, or (out, lse): as ``flash_attn_func``. The gradient of qkv comes as one tensor.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as ``flash_attn_func``; ValueError too for a qkv of
            another shape, or a num_heads_q that does not divide it.
    """
    q, k, v = _unpack(qkv, num_heads_q)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        None,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
        learnable_sink=learnable_sink,
        seqused_q=seqused,
        seqused_k=seqused,
        batch_invariant=batch_invariant,
        return_lse=return_lse,
    )


def _unpack(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, ...]:
    """q, k and v as views."""
    if not isinstance(qkv, Tensor):
        raise TypeError(f"qkv: must be a torch.Tensor, got {type(qkv).__name__}")
    if num_heads_q is None:
        if qkv.dim() != 5 or qkv.shape[2] != 3:
            raise ValueError(
                f"qkv: must be (batch, seqlen, 3, heads, head_dim), or of four dimensions with num_heads_q, got shape "
                f"{tuple(qkv.shape)}"
            )
        return qkv.unbind(2)
    if qkv.dim() != 4:
        raise ValueError(
            f"qkv: must be (batch, seqlen, heads, head_dim) with num_heads_q, got shape {tuple(qkv.shape)}"
        )
    if not isinstance(num_heads_q, int) or isinstance(num_heads_q, bool):
        raise TypeError(f"num_heads_q: must be an int or None, got {num_heads_q!r}")
    heads_kv, rest = divmod(qkv.shape[2] - num_heads_q, 2)
    if num_heads_q < 1 or heads_kv < 1 or rest:
        raise ValueError(
            f"num_heads_q: must leave an even number of qkv's {qkv.shape[2]} heads for k and v, got {num_heads_q}"
        )
    return qkv.split([num_heads_q, heads_kv, heads_kv], 2)
