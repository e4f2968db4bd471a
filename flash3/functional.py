"""The user's functions. Names, order and defaults of the parameters are FlashAttention-3's."""

from __future__ import annotations

from torch import Tensor

from flash3 import autograd, checks

_NO_WINDOW = (-1, -1)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = _NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention softmax(softmax_scale * Q K^T) V, differentiable in q, k and v.

    Any strides are accepted. A query row that sees no key gives out = 0, lse = -inf and zero gradients; lengths and
    batch may be 0. The forward is bitwise reproducible; the backward is with ``deterministic=True``.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), head_dim a multiple of 8 up to 256. float16 or bfloat16 on a Hopper
            GPU; on CPU, where the reference implementation computes, float32 and float64 too.
        k: (batch, seqlen_k, heads_kv, head_dim), dtype and device of q; heads_kv divides heads_q, and query head i uses
            key/value head i // (heads_q / heads_kv).
        v: (batch, seqlen_k, heads_kv, head_dim_v), likewise; head_dim_v a multiple of 8 up to 256 of its own.
        softmax_scale: positive factor of the scores; None is head_dim ** -0.5.
        causal: query i sees key j if j <= i + seqlen_k - seqlen_q (bottom-right aligned).
        qv, q_descale, k_descale, v_descale: not supported yet, must be None.
        window_size: (left, right), -1 is unbounded. (-1, -1), or (-1, 0), which is causal; others not supported yet.
        attention_chunk, softcap, sm_margin: not supported yet, must be 0.
        num_splits: 1, or 0 to let the library choose (it chooses 1).
        pack_gqa: a hint. None or False; packing is not supported yet.
        deterministic: bitwise equal gradients over repeated runs, slower.
        return_attn_probs: FlashAttention-3's name of ``return_lse``; probabilities are never returned.
        return_lse: return (out, lse).

    Returns:
        out: (batch, seqlen_q, heads_q, head_dim_v), contiguous, q's dtype.
        lse: (batch, heads_q, seqlen_q), if asked for: log-sum-exp of the scaled scores, natural log, float32 (float64
            for float64 inputs), differentiable.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument that is wrong or not supported, named in the message.
        RuntimeError: a GPU that is not Hopper, kernels that are not built, or a CUDA error.

    Source: FlashAttention-3 (Shah et al., 2024), section 3; the lse gradient is derived in ``flash3.reference``.
    """
    checks.check_unsupported(
        qv,
        q_descale,
        k_descale,
        v_descale,
        attention_chunk,
        softcap,
        num_splits,
        pack_gqa,
        sm_margin,
    )
    head_dim = checks.check_tensors(q, k, v)
    checks.check_flags(causal, deterministic)
    if window_size is not _NO_WINDOW:
        causal = checks.is_causal(causal, window_size)
    softmax_scale = head_dim**-0.5 if softmax_scale is None else checks.check_scale(softmax_scale)
    out, lse = autograd.attention(q, k, v, softmax_scale, causal, deterministic)
    return (out, lse) if return_lse or return_attn_probs else out
