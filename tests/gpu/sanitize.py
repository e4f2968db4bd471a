"""A few small calls of every built row, forward and backward, for a run under compute-sanitizer:

    compute-sanitizer --tool memcheck  python tests/gpu/sanitize.py
    compute-sanitizer --tool synccheck python tests/gpu/sanitize.py --rows fwd_
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py --rows hd64

Exits with 1 if a result is not finite. PYTORCH_NO_CUDA_MEMORY_CACHING=1 lets memcheck see the bounds of every tensor;
racecheck reports some bulk copies of the tensor memory accelerator that an mbarrier orders, which it does not follow.
"""

from __future__ import annotations

import argparse
import itertools
import sys

import torch

import flash3
from flash3 import _C, fp8

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
# What calls of each kind of row ask for: the mask, and sinks, which every forward row takes.
ARGUMENTS = {
    "full": {},
    "causal": {"causal": True},
    "local": {"window_size": (70, 20), "attention_chunk": 100, "softcap": 5.0},
}
# (batch, seqlen_q, seqlen_k, heads_q, heads_kv): below a tile, just past tiles, more queries than keys, several tiles.
SHAPES = [(1, 1, 1, 1, 1), (2, 65, 129, 2, 1), (1, 200, 70, 2, 2), (1, 257, 384, 4, 2)]


def attention(q, k, v, layout: str, **arguments):
    """out and lse; of packed rows, where the batch's first two sequences lie in the middle of other rows."""
    if layout == "dense":
        return flash3.flash_attn_func(q, k, v, return_lse=True, **arguments)
    lengths = [x.shape[1] for x in (q, k)]
    ends = [
        torch.tensor([0, 3, 3 + length, 3 + length, 3 + 2 * length], dtype=torch.int32).cuda()
        for length in lengths
    ]
    packed = [torch.cat([x[0, :1].expand(3, -1, -1), *x, x[-1]]) for x in (q, k, v)]
    return flash3.flash_attn_varlen_func(*packed, *ends, *lengths, return_lse=True, **arguments)


def call(dtype: torch.dtype, head_dims, mask: str, layout: str, shape, *, backward: bool) -> bool:
    """True if all results are finite where they have to be. ``head_dims``: of q and k, of v."""
    batch, seqlen_q, seqlen_k, heads_q, heads_kv = shape
    d, d_v = head_dims
    extents = (
        (batch, seqlen_q, heads_q, d),
        (batch, seqlen_k, heads_kv, d),
        (batch, seqlen_k, heads_kv, d_v),
    )
    q, k, v = (torch.randn(e, device="cuda").to(dtype).requires_grad_(backward) for e in extents)
    if not backward:
        k[:, seqlen_k // 2 :] *= 100  # rows that guess at references look again (E028)
    sink = torch.linspace(-1, 1, heads_q, device="cuda").requires_grad_(backward)
    finite = True
    for deterministic, sinks in ((False, None), (True, sink)):
        out, lse = attention(
            q, k, v, layout, deterministic=deterministic, learnable_sink=sinks, **ARGUMENTS[mask]
        )
        results = [out, lse.masked_fill(lse.isneginf(), 0.0)]
        if backward:
            grads = torch.randn_like(out), torch.randn_like(lse)
            leaves = (q, k, v) if sinks is None else (q, k, v, sink)
            results += torch.autograd.grad((out, lse), leaves, grads)
        finite &= all(bool(x.isfinite().all()) for x in results)
    return finite


def float8(head_dim: int, mask: str, shape, promote_every: int) -> bool:
    """The same of an e4m3 row: v as it is and as the quantiser lays it out."""
    batch, seqlen_q, seqlen_k, heads_q, heads_kv = shape
    q = torch.randn(batch, seqlen_q, heads_q, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, batch, seqlen_k, heads_kv, head_dim, device="cuda", dtype=torch.bfloat16)
    finite = True
    for transpose_v, block in ((False, 64), (True, 128)):
        stored = fp8.quantize_qkv(q, k, v, hadamard=False, block=block, transpose_v=transpose_v)
        out = fp8.attention(stored, promote_every=promote_every, **ARGUMENTS[mask])
        finite &= bool(out.isfinite().all())
    return finite


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help="only rows whose name holds this text")
    rows = [row for row in _C.variants() if parser.parse_args().rows in row["name"]]
    words = ("pass", "dtype", "head_dim", "head_dim_v", "mask", "layout", "tile")
    keys = [[row[key] for key in words] for row in rows]
    bad = 0
    for pass_name, dtype, head_dim, head_dim_v, mask, layout, tile in keys:
        # The row's own head_dims, and some that TMA pads up to them.
        padding = 32 if pass_name == "fp8" else 24
        for narrower, shape in itertools.product((0, padding), SHAPES):
            d = head_dim - narrower, head_dim_v - narrower
            try:
                if pass_name == "fp8":
                    finite = float8(d[0], mask, shape, int(tile["two_level"]))
                else:
                    backward = pass_name == "bwd"
                    finite = call(DTYPES[dtype], d, mask, layout, shape, backward=backward)
            except RuntimeError as error:
                if "this build has no" not in str(error):
                    raise
                verdict = "---"  # a backward row whose forward is not built
            else:
                verdict = "ok " if finite else "BAD"
                bad += not finite
            print(verdict, pass_name, dtype, mask, layout, f"d{d[0]}_{d[1]}", *shape, flush=True)
    torch.cuda.synchronize()
    print(f"{len(keys)} rows, {bad} bad results")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
