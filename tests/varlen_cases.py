"""Batches of packed sequences, each with a name, their tensors, and what the formula makes of them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import torch
from attention_math import Result, attention_math
from torch import Tensor

import flash3


@dataclass(frozen=True)
class Packed:
    """q, dout (total_q, hq, d); k, v (total_k, hk, d); dlse (hq, total_q); and where the sequences lie."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor | None
    seqused_k: Tensor | None

    def sequences(self) -> list[tuple[slice, slice]]:
        """The rows and the keys that each sequence uses."""
        sides = []
        for ends, used in (
            (self.cu_seqlens_q, self.seqused_q),
            (self.cu_seqlens_k, self.seqused_k),
        ):
            bounds = itertools.pairwise(ends.tolist())
            counts = [None] * len(ends) if used is None else used.tolist()
            sides.append(
                [
                    slice(start, end if count is None else start + count)
                    for (start, end), count in zip(bounds, counts, strict=False)
                ]
            )
        return list(zip(*sides, strict=True))

    def used(self, side: int) -> Tensor:
        """Which rows (side 0) or keys (side 1) some sequence uses."""
        mask = torch.zeros(len((self.q, self.k)[side]), dtype=torch.bool)
        for parts in self.sequences():
            mask[parts[side]] = True
        return mask.to(self.q.device)

    def poisoned(self, filler: float = math.nan) -> Packed:
        """With `filler` in every row that no sequence uses."""
        rows, keys = ~self.used(0), ~self.used(1)
        dlse = self.dlse
        if dlse is not None:
            dlse = dlse.masked_fill(rows, filler)
        fill = {"q": rows, "dout": rows, "k": keys, "v": keys}
        tensors = {
            name: getattr(self, name).masked_fill(mask[:, None, None], filler)
            for name, mask in fill.items()
        }
        return replace(self, **tensors, dlse=dlse)

    def run(
        self, *, backward: bool = True, learnable_sink: Tensor | None = None, **arguments
    ) -> Result:
        """What flash3 makes of it."""
        leaves = [self.q, self.k, self.v] + ([] if learnable_sink is None else [learnable_sink])
        leaves = [x.detach().requires_grad_(backward) for x in leaves]
        longest = [
            max((s[i].stop - s[i].start for s in self.sequences()), default=0) for i in (0, 1)
        ]
        out, lse = flash3.flash_attn_varlen_func(
            *leaves[:3],
            self.cu_seqlens_q,
            self.cu_seqlens_k,
            *longest,
            self.seqused_q,
            self.seqused_k,
            return_lse=True,
            learnable_sink=None if learnable_sink is None else leaves[3],
            **arguments,
        )
        if not backward:
            return Result(out, lse)
        outputs, grads = ((out,), (self.dout,))
        if self.dlse is not None:
            outputs, grads = (out, lse), (self.dout, self.dlse.to(lse.dtype))
        return Result(out.detach(), lse.detach(), *torch.autograd.grad(outputs, leaves, grads))

    def by_formula(
        self,
        dtype,
        *,
        backward: bool = True,
        learnable_sink: Tensor | None = None,
        **arguments,
    ) -> Result:
        """The formula on each sequence by itself, every step in `dtype`; lse at least in float32."""
        q, k, v, dout = (x.to(dtype) for x in (self.q, self.k, self.v, self.dout))
        sink = [] if learnable_sink is None else [learnable_sink.detach().to(dtype)]
        lse_dtype = torch.promote_types(dtype, torch.float32)
        out = q.new_zeros(*q.shape[:2], v.shape[2])
        lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=lse_dtype)
        dq, dk, dv, *dsink = (torch.zeros_like(x) for x in (q, k, v, *sink))

        def formula(q, k, v, *sink):
            return attention_math(q, k, v, learnable_sink=sink[0] if sink else None, **arguments)

        for rows, keys in self.sequences():
            leaves = [q[None, rows], k[None, keys], v[None, keys], *sink]
            leaves = [x.detach().requires_grad_() for x in leaves]
            one_out, one_lse = formula(*leaves)
            out[rows] = one_out[0].detach()
            lse[:, rows] = formula(*(x.detach().to(lse_dtype) for x in leaves))[1][0]
            if not backward:
                continue
            outputs, grads = [one_out], [dout[None, rows]]
            if self.dlse is not None:
                outputs.append(one_lse)
                grads.append(self.dlse[None, :, rows].to(one_lse.dtype))
            gradients = torch.autograd.grad(outputs, leaves, grads)
            dq[rows], dk[keys], dv[keys] = (x[0] for x in gradients[:3])
            if sink:
                dsink[0] += gradients[3]
        return Result(out, lse, dq, dk, dv, *dsink) if backward else Result(out, lse)


@dataclass(frozen=True)
class Batch:
    """Lengths in use; `spare` rows behind each sequence in its slot and behind the last slot, per side."""

    name: str
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    spare_q: int = 0
    spare_k: int = 0
    behind: int = 0
    head_dim: int = 64
    causal: bool = False
    num_heads_q: int = 2
    num_heads_kv: int = 2

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.name}-h{self.num_heads_q}_{self.num_heads_kv}-d{self.head_dim}-{mask}"

    def with_(self, **changes) -> Batch:
        return replace(self, **changes)

    def tensors(self, dtype, device="cpu", *, dlse: bool = False) -> Packed:
        generator = torch.Generator(device).manual_seed(21)

        def normal(*shape: int, dtype=dtype) -> Tensor:
            return torch.randn(shape, dtype=torch.float32, device=device, generator=generator).to(
                dtype
            )

        def ends(lengths, spare: int) -> Tensor:
            slots = [length + spare * (b % 3) for b, length in enumerate(lengths)]
            return torch.tensor([0, *itertools.accumulate(slots)], dtype=torch.int32)

        def used(lengths, spare: int) -> Tensor | None:
            return torch.tensor(lengths, dtype=torch.int32, device=device) if spare else None

        cu_q, cu_k = ends(self.lengths_q, self.spare_q), ends(self.lengths_k, self.spare_k)
        total_q, total_k = (int(cu[-1]) + self.behind for cu in (cu_q, cu_k))
        lse_dtype = torch.promote_types(dtype, torch.float32)
        return Packed(
            normal(total_q, self.num_heads_q, self.head_dim),
            normal(total_k, self.num_heads_kv, self.head_dim),
            normal(total_k, self.num_heads_kv, self.head_dim),
            normal(total_q, self.num_heads_q, self.head_dim),
            normal(self.num_heads_q, total_q, dtype=lse_dtype) if dlse else None,
            cu_q.to(device),
            cu_k.to(device),
            used(self.lengths_q, self.spare_q),
            used(self.lengths_k, self.spare_k),
        )


SMALL = [
    Batch("one-token", (1,), (1,)),
    Batch("three", (5, 2, 7), (3, 9, 7)),
    Batch("empty-ones", (0, 4, 0, 3, 0), (2, 0, 0, 5, 6)),
    Batch("behind", (4, 6), (5, 3), behind=5),
    Batch("seqused", (4, 0, 6, 3), (5, 3, 0, 7), spare_q=2, spare_k=3, behind=1),
]


def both_masks(batches: list[Batch]) -> list[Batch]:
    return [batch.with_(causal=causal) for causal in (False, True) for batch in batches]
