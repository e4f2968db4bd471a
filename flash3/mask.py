"""Which keys a query sees: the predicate and the range of keys to visit, together so that they cannot disagree.

Query i stands at position p = i + seqlen_k - seqlen_q among the keys: the last query at the last key. It sees key j if

- p - left <= j <= p + right, for the sides of the window that are not -1; a causal mask is right = 0;
- floor(j / chunk) = floor(p / chunk), where chunk > 0. A query in front of the first key, p < 0, is in no chunk that
  holds a key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    seqlen_q: int
    seqlen_k: int
    left: int = -1
    right: int = -1
    chunk: int = 0

    @classmethod
    def of_call(
        cls,
        lengths: tuple[int, int],
        causal: bool,
        window_left: int,
        window_right: int,
        attention_chunk: int,
    ) -> Mask:
        """From the arguments of the operators. ``lengths`` is (seqlen_q, seqlen_k)."""
        right = 0 if causal else window_right
        return cls(*lengths, window_left, right, attention_chunk)

    def keys(self, rows: slice) -> slice:
        """The keys from the first to the last that some of these query rows sees."""
        start, stop = 0, self.seqlen_k
        low, high = self._positions(rows)
        if self.left >= 0:
            start = max(start, low - self.left)
        if self.right >= 0:
            stop = min(stop, high + self.right + 1)
        if self.chunk > 0:
            start = max(start, low // self.chunk * self.chunk)
            stop = min(stop, (high // self.chunk + 1) * self.chunk)
        return slice(start, max(start, stop))

    def hide(self, scores: Tensor, rows: slice, keys: slice) -> None:
        """Sets the scores (..., rows, keys) of unseen keys to -inf, in place."""
        low, high = self._positions(rows)
        p = torch.arange(low, high + 1, device=scores.device).unsqueeze(-1)
        j = torch.arange(keys.start, keys.stop, device=scores.device)
        if self.left >= 0 and keys.start < high - self.left:
            scores.masked_fill_(j < p - self.left, -math.inf)
        if self.right >= 0 and keys.stop - 1 > low + self.right:
            scores.masked_fill_(j > p + self.right, -math.inf)
        if self.chunk > 0:
            scores.masked_fill_(j // self.chunk != p // self.chunk, -math.inf)

    def _positions(self, rows: slice) -> tuple[int, int]:
        """Of the first and the last of these rows."""
        diagonal = self.seqlen_k - self.seqlen_q
        return rows.start + diagonal, rows.stop - 1 + diagonal
