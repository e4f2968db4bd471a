"""Dense calls in which sequences use a part of their rows: such a batch is a packed one with slots of equal length."""

from __future__ import annotations

import torch
from torch import Tensor

from flash3 import autograd, checks_varlen


def attention(
    q: Tensor, k: Tensor, v: Tensor, seqused_q: Tensor | None, seqused_k: Tensor | None, *options
) -> tuple[Tensor, Tensor]:
    """out (b, sq, hq, dv) and lse (b, hq, sq) of ``flash3::varlen_fwd``, differentiable.

    Args:
        q: (b, sq, hq, d). k, v: (b, sk, hk, d) and (b, sk, hk, dv), checked already.
        seqused_q, seqused_k: (b) int32, or None.
        options: the operator's arguments from ``softmax_scale`` on.

    Raises:
        TypeError, ValueError: of seqused, or more rows than a packed tensor may have.
    """
    batch, seqlen_q = q.shape[:2]
    seqlen_k = k.shape[1]
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    slots = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    sequences = slots * seqlen_q, slots * seqlen_k, seqused_q, seqused_k
    checks_varlen.check_call(*flat, sequences, (seqlen_q, seqlen_k))
    out, lse = autograd.varlen_attention(*flat, *sequences, *options)
    out = out.unflatten(0, (batch, seqlen_q))
    return out, lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1).contiguous()
