"""The rule of accuracy, on out, lse, dq, dk, dv and dsink alike:

    max |x - right|  <=  2 * max |torch - right| + floor

`right` is the float64 formula, `torch` a PyTorch computation in the same dtype. The floor covers what the comparison
run may get exactly right by luck (one key, a gradient that is zero):

- out: half a unit in the last place of its largest element, the rounding of the result itself.
- lse: LSE_FLOOR * (1 + its largest element), float32 rounding of the scores and of the hardware's exp2 and log2.
- dq, dk, dv, dsink: rounding of the result, and GRADIENT_NOISE * max |dout| * max |q, k, v|^2: dP - dPsum cancels
  where one key has all the weight, and leaves the float32 rounding of both.
- with a sink, OUT_SIGMAS standard deviations of what the rounding of out to 16 bits does to dPsum = rowsum(dout * out),
  which the backward reads from it: each row's share of it reaches dsink times the sink's weight, and dq and dk times
  the keys'. The PyTorch computation never reads its rounded out, and where key and sink share one row its error can
  be far smaller. Without a sink a row that has one key has out = v, which is exact.
"""

from __future__ import annotations

import torch
from attention_math import Result
from cases import Inputs
from torch import Tensor

GRADIENTS = ("dq", "dk", "dv", "dsink")
FACTOR = 2.0
LSE_FLOOR = 1e-5
GRADIENT_NOISE = 2e-6
OUT_SIGMAS = 3.0


def max_abs(x: Tensor | None) -> float:
    return 0.0 if x is None or x.numel() == 0 else x.abs().max().item()


def max_error(x: Tensor, right: Tensor) -> float:
    return max_abs(x.double() - right)


def noise_of_rounded_out(right: Result, inputs: Inputs, sink: Tensor) -> dict[str, float]:
    rounding = torch.finfo(inputs.q.dtype).eps / 2 / 3**0.5
    dpsum = rounding * (inputs.dout.double() * right.out).norm(dim=-1)  # (..., sq, hq)
    # Rows that no packed sequence uses have lse -inf, and no sink.
    sink_weight = torch.exp(sink.double() - right.lse.mT).masked_fill(right.lse.mT.isneginf(), 0.0)
    of_keys = max_abs(dpsum * (1 - sink_weight)) * inputs.q.shape[-1] ** -0.5
    of_sink = (dpsum * sink_weight).flatten(0, -2).norm(dim=0)
    return {
        "dq": OUT_SIGMAS * of_keys * max_abs(inputs.k),
        "dk": OUT_SIGMAS * of_keys * max_abs(inputs.q),
        "dsink": OUT_SIGMAS * max_abs(of_sink),
    }


def floors(right: Result, inputs: Inputs, sink: Tensor | None = None) -> dict[str, float]:
    half_ulp = torch.finfo(inputs.q.dtype).eps / 2
    gradient_reach = max(max_abs(inputs.dout), max_abs(inputs.dlse))
    input_reach = max(1.0, *(max_abs(x) for x in (inputs.q, inputs.k, inputs.v)))
    noise = GRADIENT_NOISE * gradient_reach * input_reach**2
    finite_lse = right.lse[right.lse.isfinite()]
    of_out = {} if sink is None else noise_of_rounded_out(right, inputs, sink)
    return {
        "out": half_ulp * max_abs(right.out) + torch.finfo(torch.float32).eps,
        "lse": LSE_FLOOR * (1 + max_abs(finite_lse)),
        **{
            name: half_ulp * max_abs(getattr(right, name)) + noise + of_out.get(name, 0.0)
            for name in GRADIENTS
        },
    }


def assert_as_accurate(
    result: Result,
    right: Result,
    torch_result: Result,
    inputs: Inputs,
    sink: Tensor | None = None,
) -> None:
    """Applies the rule to everything that `result` holds; `torch_result` may lack lse, which then counts as exact."""
    floor = floors(right, inputs, sink)
    for name in ("out", "lse", *GRADIENTS):
        x, expected, compared = (getattr(r, name) for r in (result, right, torch_result))
        if x is None:
            continue
        assert x.shape == expected.shape, (
            f"{name}: shape {tuple(x.shape)}, not {tuple(expected.shape)}"
        )
        if name == "lse":
            no_key = expected.isneginf()
            assert torch.equal(x.isneginf(), no_key), (
                "lse: -inf belongs to rows that see no key, and only to them"
            )
            x, expected = x.masked_fill(no_key, 0.0), expected.masked_fill(no_key, 0.0)
            compared = None if compared is None else compared.masked_fill(no_key, 0.0)
        torch_error = 0.0 if compared is None else max_error(compared, expected)
        bound = FACTOR * torch_error + floor[name]
        error = max_error(x, expected)
        # Written so that a NaN fails.
        assert error <= bound, (
            f"{name}: error {error:.3e} > {bound:.3e} = {FACTOR} * {torch_error:.3e} of torch + floor {floor[name]:.1e}"
        )
