"""Rows against float64 on a few shapes, before any is timed.

out, dq, dk and dv are compared in blocks of 64 positions of a head, by the rule of gate.py with a third term:

    rms(ours - right) <= BOUND[dtype] * (rms(right) + 0.1 * rms(right, whole tensor) + FLOOR)

FLOOR is for results that are exactly 0, as dq and dk are where a query sees one key: float32 leaves about 1e-6 of a
difference of equal sums. lse: |ours - right| <= LSE_BOUND * (1 + |right|), and -inf in the same places.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from flash3.reference import attention_backward, attention_forward

from ..gate import BOUND, block_rms
from ..runner import DeviceLost, describe
from ..shapes import DTYPES
from ..timing import synchronize
from .call import RowCall, prepare
from .library import Library, Row

FLOOR = 3e-3  # inputs are N(0, 1)
LSE_BOUND = 1e-4


@dataclass(frozen=True)
class Shape:
    """One problem; its head_dims are the row's, less ``narrower`` (a multiple of 8)."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    narrower: int = 0
    growth: int = 1  # forward: the second half of the keys is so many times larger

    def __str__(self) -> str:
        narrow = f" d-{self.narrower}" if self.narrower else ""
        return (
            f"b{self.batch} sq{self.seqlen_q} sk{self.seqlen_k} h{self.heads_q}/{self.heads_kv}"
            f"{narrow}{f' k*{self.growth}' if self.growth > 1 else ''}"
        )


SHAPES = (
    Shape(2, 256, 256, 4, 2),  # whole tiles
    Shape(1, 1000, 777, 3, 1),  # causal: queries that see no key
    Shape(2, 113, 333, 2, 2, narrower=24),
    Shape(1, 2, 1, 1, 1),  # one key: dq and dk are 0
    Shape(1, 700, 300, 2, 1),
    Shape(3, 128, 1024, 6, 3, narrower=8),
    Shape(2, 900, 1100, 2, 1, growth=8),  # maxima that grow by tens, and by hundreds
    Shape(2, 900, 1100, 2, 1, growth=100),
    Shape(4, 1030, 515, 16, 4),  # more tiles than SMs: a persistent CTA takes several
)


@dataclass(frozen=True)
class Check:
    """What one row did: the largest share of the bound per result, or the first fault in words."""

    name: str  # "base:fwd_bf16_hd128_full"
    shares: dict[str, float]
    fault: str | None = None

    def as_dict(self) -> dict:
        return {"name": self.name, "shares": self.shares, "fault": self.fault}


def make_problem(row: Row, shape: Shape, device: torch.device) -> tuple[dict, dict]:
    """(values, right): inputs of the row in its dtype, and out, lse, dq, dk, dv in float64.

    The backward gets out and lse from float64 too, so that a row is judged alone.
    """
    generator = torch.Generator(device).manual_seed(0)
    head_dim, head_dim_v = row.head_dim - shape.narrower, row.head_dim_v - shape.narrower
    queries = (shape.batch, shape.seqlen_q, shape.heads_q)
    keys = (shape.batch, shape.seqlen_k, shape.heads_kv)
    sizes = {
        "q": (*queries, head_dim),
        "k": (*keys, head_dim),
        "v": (*keys, head_dim_v),
        "dout": (*queries, head_dim_v),
    }
    values = {
        name: torch.randn(size, generator=generator, device=device).to(DTYPES[row.dtype])
        for name, size in sizes.items()
    }
    if row.mode == "fwd":  # dQ would multiply the rounding of dS by it
        values["k"][:, shape.seqlen_k // 2 :] *= shape.growth
    q, k, v, dout = (values[name].double() for name in ("q", "k", "v", "dout"))
    scale = head_dim**-0.5
    right = dict(zip(("out", "lse"), attention_forward(q, k, v, scale, row.causal), strict=True))
    values |= {"out": right["out"].to(DTYPES[row.dtype]), "lse": right["lse"].float()}
    if row.mode == "bwd":
        gradients = attention_backward(
            dout, q, k, v, right["out"], right["lse"], None, scale, row.causal
        )
        right |= zip(("dq", "dk", "dv"), gradients, strict=True)
    return values, right


def share_of_bound(name: str, ours: torch.Tensor, right: torch.Tensor) -> float:
    """Largest error over allowed error, infinite when a value that should be finite is not."""
    if name == "lse":
        no_key = right.isneginf()
        if not torch.equal(ours.isneginf(), no_key):
            return math.inf
        right = right.masked_fill(no_key, 0.0)
        error = (ours.double().masked_fill(no_key, 0.0) - right).abs()
        shares = error / (LSE_BOUND * (1 + right.abs()))
    else:
        expected = block_rms(right)
        allowed = expected + 0.1 * expected.square().mean().sqrt() + FLOOR
        shares = block_rms(ours.double() - right) / (BOUND[ours.dtype] * allowed)
    worst = shares.max().item()
    return worst if worst == worst else math.inf


def run_poisoned(call: RowCall, device: torch.device) -> dict[str, torch.Tensor]:
    call.poison()
    call()
    synchronize(device)
    return {name: tensor.clone() for name, tensor in call.results().items()}


def shares_on(library: Library, row: Row, shape: Shape, device: torch.device) -> dict[str, float]:
    """Shares of the bound on one shape; of a backward row also in the deterministic order, twice."""
    values, right = make_problem(row, shape, device)
    shares = {}
    for deterministic in (False, True) if row.mode == "bwd" else (False,):
        call = prepare(library, row, values, deterministic)
        results = run_poisoned(call, device)
        suffix = " deterministic" if deterministic else ""
        for name, ours in results.items():
            shares[name + suffix] = share_of_bound(name, ours, right[name])
        if deterministic and max(shares.values()) <= 1:
            for name, again in run_poisoned(call, device).items():
                shares[f"{name} repeated"] = 0.0 if torch.equal(again, results[name]) else math.inf
    return shares


def check_row(library: Library, row: Row, device: torch.device) -> Check:
    """Runs the row over SHAPES, up to the first that is wrong. Raises what a launch raises."""
    name = library.name(row)
    largest: dict[str, float] = {}
    for shape in SHAPES:
        shares = shares_on(library, row, shape, device)
        for result, share in shares.items():
            largest[result] = max(share, largest.get(result, 0.0))
        wrong = [f"{result} {share:.3g}" for result, share in shares.items() if share > 1]
        if wrong:
            return Check(name, largest, f"{shape}: {', '.join(wrong)} times the bound")
    return Check(name, largest)


def check_rows(
    libraries: Sequence[Library],
    modes: Sequence[str],
    device: torch.device,
    say: Callable[[str], None],
) -> Iterator[Check]:
    """Checks every row of the passes in ``modes``. A row that raises is wrong.

    ``say`` gets a row's name before the row runs, so that the last line names a kernel that hangs, and then what came
    of it. Raises DeviceLost, after the check that says so, when the device cannot go on.
    """
    for library in libraries:
        for row in (row for row in library.rows if row.mode in modes):
            say(f"check {library.name(row)} ({row.tile})")
            lost = None
            try:
                check = check_row(library, row, device)
            except RuntimeError as error:
                check = Check(library.name(row), {}, describe(error))
                lost = lost_device(device)
            worst = max(check.shares.values(), default=0.0)
            say(f"  WRONG: {check.fault}" if check.fault else f"  ok, {worst:.2f} of the bound")
            yield check
            if lost is not None:
                raise DeviceLost(f"{check.name}: {lost}")


def lost_device(device: torch.device) -> str | None:
    """What the device says if an error has left it unusable."""
    try:
        synchronize(device)
    except RuntimeError as sticky:
        return describe(sticky)
    return None
