"""Attention over sequences of different lengths, packed one after the other. Parameters are FlashAttention-3's."""

from __future__ import annotations

from torch import Tensor

from flash3 import autograd, checks, checks_varlen
from flash3.checks_options import NO_WINDOW, check_options


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``flash_attn_func`` for each sequence of a batch by itself; the sequences lie one after the other in q, k, v.

    Sequence b has the slot of rows [cu_seqlens[b], cu_seqlens[b + 1]) and uses the first seqused[b] rows of it, or all.
    Rows that no sequence uses, at the end of a slot or behind the last one, may hold anything, NaN too: they have
    out = 0, lse = -inf and zero gradients. Lengths may be 0. The host never waits for the device.

    Args:
        q: (total_q, heads_q, head_dim), at most 2^30 rows; head_dim and dtype as in ``flash_attn_func``.
        k: (total_k, heads_kv, head_dim), v: (total_k, heads_kv, head_dim_v), likewise; heads_kv divides heads_q.
        cu_seqlens_q, cu_seqlens_k: (batch + 1) int32, contiguous, on q's device: 0, then the end of each slot. With
            FLASH3_DEBUG=1 in the environment each call checks what they hold, which waits for the device; without,
            wrong numbers give wrong results, but touch no memory outside the tensors.
        max_seqlen_q, max_seqlen_k: the largest length, an int or a tensor of one element. Nothing depends on them.
        seqused_q, seqused_k: (batch) int32, contiguous, on q's device: rows in use of each slot; None is all.
        causal: query i of a sequence sees key j if j <= i + length_k - length_q, of the lengths in use.
        window_size, attention_chunk: as in ``flash_attn_func``, for each sequence: p = i + length_k - length_q.
        softmax_scale, softcap, deterministic, learnable_sink, batch_invariant, return_attn_probs, return_lse: as in
            ``flash_attn_func``.
        qv, q_descale, k_descale, v_descale, num_splits, pack_gqa, sm_margin: as in ``flash_attn_func``, not supported
            yet beyond their defaults.

    Returns:
        out: (total_q, heads_q, head_dim_v), contiguous, q's dtype.
        lse: (heads_q, total_q), if asked for: log-sum-exp of the scores, as scaled and capped, and of the sink; natural
            log, float32 (float64 for float64 inputs), differentiable.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument that is wrong or not supported, named in the message.
        RuntimeError: a GPU that is not Hopper, kernels that are not built, or a CUDA error.
    """
    checks.check_unsupported(qv, q_descale, k_descale, v_descale, num_splits, pack_gqa, sm_margin)
    sequences = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    checks_varlen.check_call(q, k, v, sequences, (max_seqlen_q, max_seqlen_k))
    flags = causal, deterministic, batch_invariant
    scores = window_size, attention_chunk, softcap, learnable_sink
    options = check_options((q, k, v), softmax_scale, *flags, *scores)
    out, lse = autograd.varlen_attention(q, k, v, *sequences, *options)
    return (out, lse) if return_lse or return_attn_probs else out
