"""Windows, chunks, caps and sinks that tests run over, and the rule of tolerance.py on such calls."""

from __future__ import annotations

import pytest
import torch
from attention_math import Result, run_flash3, run_float64, run_same_dtype
from cases import Case
from gpu_tier import row_built
from tolerance import assert_as_accurate
from torch import Tensor
from varlen_cases import Batch

# (left, right). Edges lie beside those of tiles (64, 80, 112, 128), on both sides; some windows are wider than a tile,
# some narrower, some open to one side, some beyond all lengths.
WINDOWS = [
    (0, 0),
    (1, 0),
    (63, 1),
    (64, 64),
    (127, 0),
    (128, 129),
    (200, 31),
    (-1, 70),
    (95, -1),
    (5000, 3),
]
CHUNKS = [1, 17, 64, 100, 128, 257, 5000]
SOFTCAPS = [0.5, 5.0, 50.0]
# Everything at once, and each pair that shares code.
COMBINATIONS = [
    {"window_size": (100, 20), "attention_chunk": 150},
    {"window_size": (100, 20), "softcap": 3.0},
    {"attention_chunk": 130, "softcap": 3.0},
    {"window_size": (70, 200), "attention_chunk": 190, "softcap": 3.0},
]


def sink_of(heads: int, dtype=torch.float32, device="cpu", *, offset: float = 0.0) -> Tensor:
    """Logits from far below a row's scores to far above them."""
    return (torch.linspace(-2.0, 6.0, heads) + offset).to(dtype).to(device)


def mask_of(causal: bool, window_size=(-1, -1), attention_chunk=0, softcap=0.0, **_) -> str:
    """The word of the table for the rows that serve such a call."""
    if tuple(window_size) == (-1, -1) and not attention_chunk and not softcap:
        return "causal" if causal else "full"
    return "local"


def _missing(dtype, head_dim: int, mask: str, layout: str) -> list[str]:
    missing = [p for p in ("fwd", "bwd") if not row_built(p, dtype, head_dim, mask, layout)]
    if "fwd" in missing:
        pytest.skip(f"not built: forward row {dtype} head_dim {head_dim} {mask} {layout}")
    return missing


def check_dense(
    case: Case, dtype, *, dlse=False, magnitude=1.0, inputs=None, deterministic=False, **arguments
) -> Result:
    """Runs a case and applies the rule; skips what the build lacks, after checking the forward if that is there."""
    widest = max(case.head_dim, case.head_dim_v or 0)
    missing = _missing(dtype, widest, mask_of(case.causal, **arguments), "dense")
    inputs = inputs or case.inputs(dtype, "cuda", dlse=dlse, magnitude=magnitude)
    arguments = {**arguments, "causal": case.causal, "backward": not missing}
    result = run_flash3(inputs, deterministic=deterministic, **arguments)
    by_formula = [run(inputs, **arguments) for run in (run_float64, run_same_dtype)]
    assert_as_accurate(result, *by_formula, inputs, arguments.get("learnable_sink"))
    if missing:
        pytest.skip("not built: backward row; the forward passed")
    return result


def check_packed(
    batch: Batch, dtype, *, dlse=False, deterministic=False, packed=None, **arguments
) -> Result:
    """The same for packed sequences, each of them by itself."""
    missing = _missing(dtype, batch.head_dim, mask_of(batch.causal, **arguments), "packed")
    packed = packed or batch.tensors(dtype, "cuda", dlse=dlse)
    arguments = {**arguments, "causal": batch.causal, "backward": not missing}
    result = packed.run(deterministic=deterministic, **arguments)
    by_formula = [packed.by_formula(kind, **arguments) for kind in (torch.float64, dtype)]
    assert_as_accurate(result, *by_formula, packed, arguments.get("learnable_sink"))
    if missing:
        pytest.skip("not built: backward row; the forward passed")
    return result
