"""Partial results for the same rows: outputs are put together by their log-sum-exp, gradients are added.

Both start as the first part, in the tensor that is returned, and end there. In between the sum is kept in float32: 16
bits are rounded to only once at the end, whatever the number of parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash3 import ops, reference


class RunningOutput:
    """out (batch, rows, heads, head_dim) and lse (batch, heads, rows), to which further keys are added one by one."""

    def __init__(self, out: Tensor, lse: Tensor, parts_to_come: int):
        self._out, self._lse, self._parts_to_come = out, lse, parts_to_come
        self._sum = out

    def add(self, out: Tensor, lse: Tensor) -> None:
        self._parts_to_come -= 1
        if self._parts_to_come == 0:
            target = self._out
        elif self._sum is self._out:
            dtype = reference.accumulate_dtype(out.dtype)
            target = torch.empty(out.shape, dtype=dtype, device=out.device)
        else:
            target = self._sum
        ops.merge(target, self._lse, self._sum, self._lse, out, lse)
        self._sum = target


class RunningSum:
    """dq (batch, rows, heads, head_dim), to which further keys are added one by one."""

    def __init__(self, dq: Tensor, parts_to_come: int):
        self._dq, self._parts_to_come = dq, parts_to_come
        self._sum = dq

    def add(self, part: Tensor) -> None:
        self._parts_to_come -= 1
        if self._parts_to_come == 0:  # added in float32 whatever the dtypes, and rounded
            torch.add(self._sum, part, out=self._dq)
        elif self._sum is self._dq:
            self._sum = part.to(reference.accumulate_dtype(part.dtype), copy=True).add_(self._dq)
        else:
            self._sum.add_(part)
