"""Attention over several ranks and the same in one process: cases, inputs, and what both return."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import flash3
import flash3.distributed
from flash3.distributed import layout

FUNCTIONS = ("ring", "allgather", "ulysses")
NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """Lengths are those of one rank's shard."""

    function: str
    causal: bool
    order: str = "zigzag"
    seqlen_q: int = 6
    seqlen_k: int = 6
    heads_q: int = 24
    heads_kv: int = 24
    head_dim: int = 8
    batch: int = 2
    dlse: bool = True
    head_dim_v: int | None = None  # head_dim

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return (
            f"{self.function}-{mask}-{self.order}-b{self.batch}-sq{self.seqlen_q}-sk{self.seqlen_k}"
            f"-h{self.heads_q}_{self.heads_kv}-d{self.head_dim}"
        )

    def inputs(self, size: int, dtype: torch.dtype, device="cpu") -> list[Tensor]:
        """q, k, v, dout (b, size * seqlen, heads, d) and dlse (b, heads, size * seqlen_q) of the whole sequence."""
        generator = torch.Generator(device).manual_seed(7)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

        q = (self.batch, size * self.seqlen_q, self.heads_q)
        k = (self.batch, size * self.seqlen_k, self.heads_kv)
        d, dv = self.head_dim, self.head_dim_v or self.head_dim
        shapes = ((*q, d), (*k, d), (*k, dv), (*q, dv))
        tensors = [normal(*shape).to(dtype) for shape in shapes]
        dlse = normal(self.batch, self.heads_q, size * self.seqlen_q)
        return [*tensors, dlse.to(torch.promote_types(dtype, torch.float32))]


def on_one_rank(
    case: Case,
    size: int,
    dtype: torch.dtype,
    computed_in: torch.dtype | None = None,
    device="cpu",
    drawn_on=None,
) -> dict[str, Tensor]:
    """The whole sequence in one call; the inputs are rounded to ``dtype``. A device draws numbers of its own."""
    inputs = case.inputs(size, dtype, drawn_on or device)
    q, k, v, dout, dlse = (x.to(device, computed_in or x.dtype) for x in inputs)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = flash3.flash_attn_func(q, k, v, causal=case.causal, return_lse=True)
    return _differentiate(case, out, lse, (q, k, v), dout, dlse)


def on_many_ranks(
    case: Case, comm, rank: int, size: int, dtype: torch.dtype, device="cpu"
) -> dict[str, Tensor]:
    """This rank's part of it."""
    whole = case.inputs(size, dtype, device)
    q, k, v, dout = (layout.shard(x, rank, size, 1, case.order) for x in whole[:4])
    dlse = layout.shard(whole[4], rank, size, 2, case.order)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    function = getattr(flash3.distributed, f"{case.function}_attn_func")
    out, lse = function(q, k, v, comm, causal=case.causal, order=case.order, return_lse=True)
    return _differentiate(case, out, lse, (q, k, v), dout, dlse)


def _differentiate(case, out, lse, leaves, dout, dlse) -> dict[str, Tensor]:
    outputs, gradients = ((out, lse), (dout, dlse)) if case.dlse else ((out,), (dout,))
    grads = torch.autograd.grad(outputs, leaves, gradients)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


def put_together(parts: list[dict[str, Tensor]], case: Case) -> dict[str, Tensor]:
    """The ranks' results as those of the whole sequence."""
    whole = {}
    for name in NAMES:
        shards = [part[name].transpose(1, 2) if name == "lse" else part[name] for part in parts]
        x = layout.in_sequence_order(torch.stack(shards), case.order)
        whole[name] = x.transpose(1, 2) if name == "lse" else x
    return whole
