"""Windows, chunks, softcap, sinks and packed documents, timed beside FlexAttention and torch's varlen attention:

    python -m benchmarks.features --out results
    python -m benchmarks.features --match window --modes fwd

TFLOP/s count the pairs of a query and a key that are seen. "of ideal" is the share of the speed that flash3 has on
the same tensors without the feature (of packed sequences: on equal ones with as much work): 1.00 is a cost that is
proportional to the pairs seen. Results are compared with flash3's reference first; a wrong one is not timed.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from flash3 import reference, reference_varlen

from .feature_peers import LABELS, PEERS, CannotCompute, ends_of, flash3_forward
from .feature_shapes import Shape, named
from .gate import RESULTS, WrongResult, share_of_bound
from .machine import describe_machine, gpu_state
from .report import MISSING, markdown_table, tflops_text
from .shapes import DTYPES
from .timing import Contender, interleave, synchronize, warm_up


def make_tensors(shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """q, k, v and dout, N(0, 1), (batch, seqlen, heads, head_dim), and a sink if the shape has one."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(heads: int) -> Tensor:
        size = (*shape.rows, heads, shape.head_dim)
        return torch.randn(size, generator=generator, device=device).to(dtype)

    values = {"q": randn(shape.heads), "k": randn(shape.heads_kv), "v": randn(shape.heads_kv)}
    values["dout"] = randn(shape.heads)
    if shape.sink:
        values["sink"] = torch.linspace(-2, 4, shape.heads, device=device).requires_grad_()
    return values


def make_call(forward, values: dict[str, Tensor], mode: str):
    """A call that returns (out,) and records no graph, or (dq, dk, dv) of a graph that is recorded here."""
    if mode == "fwd":
        q, k, v = (values[name] for name in "qkv")
        return torch.no_grad()(lambda: (forward(q, k, v),))
    leaves = [values[name].detach().clone().requires_grad_() for name in "qkv"]
    out = forward(*leaves)
    if "sink" in values:  # which requires a gradient
        leaves.append(values["sink"])
    return partial(torch.autograd.grad, out, leaves, values["dout"], retain_graph=True)


@torch.no_grad()
def right_results(shape: Shape, values: dict[str, Tensor], mode: str) -> tuple[Tensor, ...]:
    """By the reference, on the same device."""
    q, k, v, dout = (values[name] for name in ("q", "k", "v", "dout"))
    scores = *shape.window, shape.chunk, shape.softcap
    common = shape.head_dim**-0.5, shape.causal
    forward, backward = reference.attention_forward, reference.attention_backward
    sequences = ()
    if shape.packed:
        q, k, v, dout = (x[0] for x in (q, k, v, dout))
        ends = ends_of(shape, q.device)
        sequences = ends, ends, None, None
        forward, backward = reference_varlen.varlen_forward, reference_varlen.varlen_backward
    out, lse = forward(q, k, v, *sequences, *common, values.get("sink"), *scores)
    results = (out,)
    if mode == "bwd":
        results = backward(dout, q, k, v, out, lse, None, *sequences, *common, *scores)
    return tuple(x[None] for x in results) if shape.packed else results


def check(right: tuple[Tensor, ...], results: tuple[Tensor, ...], mode: str) -> float:
    """The largest share of the bound of gate.py; raises WrongResult above 1. Does not look at the sink's gradient."""
    shares = {
        name: share_of_bound(x, y)
        for name, x, y in zip(RESULTS[mode], results, right, strict=False)
    }
    name, share = max(shares.items(), key=lambda item: item[1])
    if not share <= 1:
        raise WrongResult(f"{name} differs from the reference by {share:.3g} times the bound")
    return share


def measure(shape: Shape, mode: str, args, device: torch.device) -> dict:
    """A row of the result file."""
    dtype = DTYPES[args.dtype]
    values = make_tensors(shape, dtype, device)
    right = right_results(shape, values, mode)
    results: dict[str, dict] = {}
    row = {"shape": shape.name, "mode": mode, "pairs": shape.pairs, "results": results}
    calls, shares = {}, {}
    for name in args.only:
        try:
            call = make_call(PEERS[name](shape, device, values.get("sink")), values, mode)
            shares[name] = check(right, call(), mode)
            synchronize(device)
            calls[name] = call
        except CannotCompute as error:
            results[name] = {"cannot": str(error)}
        except Exception as error:  # the others are worth a try
            results[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    del right
    work = dict.fromkeys(calls, shape.flops(mode))
    plain = shape.without()
    if "flash3" in calls:
        forward = flash3_forward(plain, device, None)
        calls["plain"] = make_call(forward, make_tensors(plain, dtype, device), mode)
        work["plain"] = plain.flops(mode)
    contenders = [Contender(name, call) for name, call in calls.items()]
    counts = {c.name: warm_up(c, device, args.warmup, args.sample_ms) for c in contenders}
    for name, samples in interleave(contenders, counts, args.rounds, device).items():
        timed = {**samples.as_dict(), "share_of_bound": shares.get(name)}
        results[name] = {**timed, "tflops": work[name] / timed["ms_median"] * 1e-9}
    return row


def table(rows: list[dict], names: list[str]) -> str:
    """TFLOP/s of each, flash3's time and its share of the speed without the feature."""
    header = ["", "flash3, ms", *(f"{LABELS[name]}" for name in names), "of ideal"]
    lines = []
    for row in rows:
        results = row["results"]
        ours, plain = (results.get(name, {}) for name in ("flash3", "plain"))
        speeds = [results.get(name, {}).get("tflops") for name in names]
        lines.append(
            [
                f"{row['shape']}, {row['mode']}",
                f"{ours['ms_median']:.3g}" if "ms_median" in ours else MISSING,
                *(MISSING if speed is None else tflops_text(speed) for speed in speeds),
                f"{ours['tflops'] / plain['tflops']:.2f}" if "tflops" in ours else MISSING,
            ]
        )
    return markdown_table(header, lines)


def blocks(result: dict) -> dict[str, str]:
    """The table for a README, of those who computed any shape."""
    rows = result["rows"]
    names = [n for n in PEERS if any("tflops" in row["results"].get(n, {}) for row in rows)]
    return {"features": table(rows, names)}


def notes(rows: list[dict]) -> list[str]:
    """What did not run, and why."""
    found = {
        f"- {LABELS[name]}: {result.get('error') or result['cannot']} ({row['shape']}, {row['mode']})"
        for row in rows
        for name, result in row["results"].items()
        if "tflops" not in result
    }
    return sorted(found)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.features",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--match", default="", help="regular expression: only shapes with such a name")
    add("--modes", type=lambda text: text.split(","), default=["fwd", "bwd"], help="fwd,bwd")
    add("--only", type=lambda text: text.split(","), default=list(PEERS), help=",".join(PEERS))
    add("--dtype", choices=DTYPES, default="bf16")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--rounds", type=int, default=7, help="samples per contender (default 7)")
    add("--warmup", type=float, default=0.1, help="seconds per contender and shape")
    add("--sample-ms", type=float, default=3.0, help="least length of one sample")
    add("--out", type=Path, help="folder for JSON and the table")
    add("--name", default="features", help="file name stem in --out")
    args = parser.parse_args(argv)
    for flag, given, known in (
        ("--only", args.only, PEERS),
        ("--modes", args.modes, RESULTS),
    ):
        if unknown := set(given) - set(known):
            parser.error(
                f"{flag}: unknown {', '.join(sorted(unknown))}; there are {', '.join(known)}"
            )
    try:
        args.shapes = named(args.match)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device(args.device)
    result = {"schema": 1, "command": "features", "dtype": args.dtype}
    result |= {"machine": describe_machine(device), "gpu_state": gpu_state(device), "rows": []}
    rows = result["rows"]
    for shape in args.shapes:
        for mode in args.modes:
            rows.append(measure(shape, mode, args, device))
            print(table(rows[-1:], args.only), flush=True)
            if args.out:  # a run that is cut short leaves what it has
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / f"{args.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    text = "\n".join([table(rows, args.only), "", *notes(rows)])
    print("\n" + text)
    if args.out:
        (args.out / f"{args.name}.md").write_text(text + "\n")
    return 1 if any("error" in row["results"].get("flash3", {}) for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
