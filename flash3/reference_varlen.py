"""Attention over packed sequences, in plain PyTorch: :mod:`flash3.reference` on one sequence after the other.

Sequence b has the slot of rows [cu_seqlens[b], cu_seqlens[b + 1]) and uses the first seqused[b] of it, or all where
seqused is None. Rows that no sequence uses have out = 0, lse = -inf and no gradient, and nothing that they hold has any
effect. These functions serve CPU tensors in ``torch.ops.flash3``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from flash3.reference import accumulate_dtype, attention_backward, attention_forward


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    softmax_scale: float,
    causal: bool,
    *extras,
) -> tuple[Tensor, Tensor]:
    """Attention output and log-sum-exp of the scaled scores.

    Args:
        q: (total_q, hq, d) of any floating dtype. k: (total_k, hk, d), v: (total_k, hk, dv), hq a multiple of hk.
        cu_seqlens_q, cu_seqlens_k: (batch + 1) int32. seqused_q, seqused_k: (batch) int32, or None.
        softmax_scale, causal, extras: as in ``attention_forward``, for each sequence by itself; extras are its sink,
            window_left, window_right, attention_chunk and softcap, or the first of them.

    Returns:
        out: (total_q, hq, dv), contiguous, q's dtype. lse: (hq, total_q), dtype of ``accumulate_dtype``.
    """
    out = q.new_zeros((*q.shape[:2], v.shape[2]))
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=accumulate_dtype(q.dtype))
    for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
        one_out, one_lse = attention_forward(
            q[None, rows], k[None, keys], v[None, keys], softmax_scale, causal, *extras
        )
        out[rows], lse[:, rows] = one_out[0], one_lse[0]
    return out, lse


def varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    softmax_scale: float,
    causal: bool,
    *extras,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk, dv of :func:`varlen_forward`: contiguous, shapes and dtypes of q, k, v.

    ``extras`` are window_left, window_right, attention_chunk and softcap, or the first of them.
    """
    gradients = tuple(x.new_zeros(x.shape) for x in (q, k, v))
    for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
        ones = attention_backward(
            dout[None, rows],
            q[None, rows],
            k[None, keys],
            v[None, keys],
            out[None, rows],
            lse[None, :, rows],
            None if dlse is None else dlse[None, :, rows],
            softmax_scale,
            causal,
            *extras,
        )
        for gradient, one, where in zip(gradients, ones, (rows, keys, keys), strict=True):
            gradient[where] = one[0]
    return gradients


def _sequences(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_q: Tensor | None, seqused_k: Tensor | None
) -> Iterator[tuple[slice, slice]]:
    """The rows and the keys that each sequence uses."""
    return zip(_used(cu_seqlens_q, seqused_q), _used(cu_seqlens_k, seqused_k), strict=True)


def _used(cu_seqlens: Tensor, seqused: Tensor | None) -> list[slice]:
    used = cu_seqlens.diff() if seqused is None else seqused
    starts = cu_seqlens[:-1]
    return [slice(*bounds) for bounds in torch.stack((starts, starts + used), -1).tolist()]
