"""Partial results: attention of the same queries to different keys, put together by their log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

from flash3 import ops, reference


class RunningOutput:
    """out and lse of some query rows, to which the results for further keys are added one by one.

    Starts as the result for the first keys, in ``out`` (batch, rows, heads, head_dim) and ``lse`` (batch, heads,
    rows), and ends there: views of the tensors that are returned. In between the sum is kept in float32, so that 16
    bits are rounded to only once at the end, whatever the number of parts.
    """

    def __init__(self, out: Tensor, lse: Tensor, parts_to_come: int):
        self._out, self._lse, self._parts_to_come = out, lse, parts_to_come
        self._sum = out

    def add(self, out: Tensor, lse: Tensor) -> None:
        self._parts_to_come -= 1
        if self._parts_to_come == 0:
            target = self._out
        elif self._sum is self._out:
            target = torch.empty(
                out.shape, dtype=reference.accumulate_dtype(out.dtype), device=out.device
            )
        else:
            target = self._sum
        ops.merge(target, self._lse, self._sum, self._lse, out, lse)
        self._sum = target
