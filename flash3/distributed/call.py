"""What the distributed functions share: checked arguments, the operators on local tensors, the autograd node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flash3 import checks, checks_varlen, ops
from flash3.distributed import layout
from flash3.distributed.communicator import Communicator

_DTYPES = checks.REFERENCE_DTYPES


@dataclass(frozen=True)
class Call:
    """The arguments of one call that are no tensors."""

    comm: Communicator
    softmax_scale: float
    causal: bool
    deterministic: bool
    order: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """out and lse of local tensors."""
        return ops.fwd(q, k, v, self.softmax_scale, causal, self.deterministic)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dlse: Tensor | None,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The part of dq that comes from these keys, and dk, dv of these queries.

        ``out`` and ``lse`` are those of all keys together: the probabilities of a block follow from the whole
        sequence's lse, and dPsum from its out.
        """
        return ops.bwd(
            dout, q, k, v, out, lse, dlse, self.softmax_scale, causal, self.deterministic
        )


class Method(Protocol):
    """A way to compute attention over several ranks, forward and backward, on this rank's tensors."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse."""

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dlse: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv."""


class DistributedAttention(torch.autograd.Function):
    """The autograd node of a method."""

    @staticmethod
    def forward(ctx, q, k, v, method: Method):
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = method.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.method = method
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return None, None, None, None
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        with torch._C._AutoDispatchBelowAutograd():
            return *ctx.method.backward(dout, q, k, v, out, lse, dlse), None


def checked(
    comm: Communicator,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    deterministic: bool,
    order: str,
) -> Call:
    """Raises unless the local tensors are something that the ranks compute together."""
    layout.check_order(order)
    head_dim = checks.check_tensors(q, k, v)
    checks.check_flags(causal, deterministic)
    scale = head_dim**-0.5 if softmax_scale is None else checks.check_scale(softmax_scale)
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"q, k: with causal=True a rank must hold the same positions of both, got lengths {q.shape[1]} and "
            f"{k.shape[1]}"
        )
    if causal:
        layout.check_even(q.shape[1], order, "q, k")
    comm.check_same(
        {
            "q: batch": q.shape[0],
            "q: length of the local shard": q.shape[1],
            "q: heads": q.shape[2],
            "q: head_dim": head_dim,
            "v: head_dim": v.shape[3],
            "k: length of the local shard": k.shape[1],
            "k: heads": k.shape[2],
            "q: dtype (place in the list of accepted ones)": _DTYPES.index(q.dtype),
            "causal": int(causal),
            "order (place in the list of accepted ones)": layout.ORDERS.index(order),
        },
        q.device,
    )
    # Without a mask the order of the keys is of no account, and that of the queries comes back as it went.
    return Call(comm, scale, causal, deterministic, order if causal else "contiguous")


def checked_packed(
    comm: Communicator,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    softmax_scale: float | None,
    causal: bool,
    deterministic: bool,
    order: str,
) -> Call:
    """The same for packed sequences (tokens_local, heads, head_dim); the order is kept with any mask."""
    layout.check_order(order)
    head_dim = checks_varlen.check_packed_tensors(q, k, v)
    checks_varlen.check_sequences(q.device, (cu_seqlens, cu_seqlens, None, None), (0, 0))
    checks.check_flags(causal, deterministic)
    scale = head_dim**-0.5 if softmax_scale is None else checks.check_scale(softmax_scale)
    if q.shape[0] != k.shape[0]:
        raise ValueError(
            f"q, k: a rank must hold the same positions of both, got {q.shape[0]} and {k.shape[0]} tokens"
        )
    layout.check_even(q.shape[0], order, "q, k")
    comm.check_same(
        {
            "q: tokens of the local shard": q.shape[0],
            "q: heads": q.shape[1],
            "q: head_dim": head_dim,
            "v: head_dim": v.shape[2],
            "k: heads": k.shape[1],
            "q: dtype (place in the list of accepted ones)": _DTYPES.index(q.dtype),
            "cu_seqlens: number of documents": cu_seqlens.shape[0] - 1,
            "causal": int(causal),
            "order (place in the list of accepted ones)": layout.ORDERS.index(order),
        },
        q.device,
    )
    return Call(comm, scale, causal, deterministic, order)
