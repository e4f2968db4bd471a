"""Whether the GPU tier can run, and which kernel rows this build holds."""

from __future__ import annotations

import torch

from flash3 import ops
from flash3.checks import HOPPER


def why_no_gpu_tier() -> str | None:
    """None if the GPU tier can run here, else the reason."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != HOPPER:
        return f"{torch.cuda.get_device_name()} has capability {capability}, not Hopper's {HOPPER}"
    return ops.kernels_missing


def row_built(
    pass_name: str,
    dtype: torch.dtype,
    head_dim: int,
    mask: bool | str,
    layout: str = "dense",
    head_dim_v: int | None = None,
) -> bool:
    """Whether this build holds a kernel row for such calls.

    ``mask`` is its word in the table, or whether causal; ``head_dim_v`` None is head_dim.
    """
    from flash3 import _C

    if isinstance(mask, bool):
        mask = "causal" if mask else "full"
    words = {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype], mask
    try:
        _C.plan(
            pass_name, *words, 1, 128, 128, 1, 1, head_dim, layout=layout, head_dim_v=head_dim_v
        )
    except RuntimeError as error:
        if "this build has no" not in str(error):
            raise
        return False
    return True
