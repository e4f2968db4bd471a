"""Attention over several GPUs on paper: bytes that travel against time in kernels.

    python -m benchmarks.context_model                               # the tables
    python -m benchmarks.context_model --write docs/distributed.md   # into its <!-- bench:context_... --> blocks

A pass (forward or backward) is a row of steps, each a kernel with bytes that travel beside it, and bytes beside which
nothing runs. Bytes are those that a rank sends; it receives as many. The numbers of the machine are constants below, so
this is what could be, not what was measured: merging, adding, copying and launching take no time here.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .report import markdown_table, update_file

NETWORKS = {
    "NVLink": 450e9,
    "InfiniBand": 50e9,
}  # bytes per second, direction and GPU: H200, 400 Gb/s
SPEED = {"forward": 600e12, "backward": 500e12}  # of the kernels, FLOP/s
HALF, SINGLE = 2, 4  # bytes of bf16 and float32
TOLERATED = 0.1  # of the kernels' time, where communication cannot be hidden


@dataclass(frozen=True)
class Problem:
    """One sequence in bf16 under a causal mask in zigzag order."""

    ranks: int
    local: int  # length of a rank's shard
    heads: int = 32
    heads_kv: int = 32
    head_dim: int = 128
    batch: int = 1

    def flops(self, direction: str) -> float:
        """Of one rank: an equal share of the triangle; two products forward, five backward."""
        whole = 4 * self.batch * self.heads * self.head_dim * (self.ranks * self.local) ** 2 / 2
        return whole / self.ranks * (2.5 if direction == "backward" else 1.0)

    def bytes_of(self, heads: float, element: int) -> float:
        """A rank's shard of one tensor with so many heads."""
        return self.batch * self.local * heads * self.head_dim * element


@dataclass(frozen=True)
class Pass:
    """What one rank does."""

    kernel: float  # seconds of a step
    beside: list[float]  # bytes that travel beside each step's kernel
    exposed: float  # bytes beside which nothing runs

    @property
    def bytes(self) -> float:
        return sum(self.beside) + self.exposed

    @property
    def kernels(self) -> float:
        return self.kernel * len(self.beside)

    def seconds(self, bandwidth: float) -> float:
        steps = (max(self.kernel, sent / bandwidth) for sent in self.beside)
        return sum(steps) + self.exposed / bandwidth

    def share(self, bandwidth: float) -> float:
        """Of the time, in kernels."""
        return self.kernels / self.seconds(bandwidth)


def ring(problem: Problem, direction: str) -> Pass:
    """k and v go to the next rank beside every step but the last. In the backward the sums of dk and dv follow one step
    behind, in float32 but for the first hop, which carries one part, and the last, home, which carries the rounded sum
    and is beside nothing."""
    n = problem.ranks
    kernel = problem.flops(direction) / n / SPEED[direction]
    kv = 2 * problem.bytes_of(problem.heads_kv, HALF)
    if direction == "forward" or n == 1:
        return Pass(kernel, [kv] * (n - 1) + [0], 0)
    kv_later = [kv] * (n - 2) + [0]
    dkv = [kv] + [2 * problem.bytes_of(problem.heads_kv, SINGLE)] * (n - 2)
    beside = [kv] + [a + b for a, b in zip(kv_later, dkv, strict=True)]
    return Pass(kernel, beside, exposed=kv)


def heads_per_step(heads_kv: int) -> int:
    """The default of allgather_attn_func."""
    return next(h for h in range(-(-heads_kv // 4), heads_kv + 1) if heads_kv % h == 0)


def allgather(problem: Problem, direction: str) -> Pass:
    """k and v of some heads are gathered beside the kernels of the heads before, and their dk and dv go to the owners
    beside the kernels of the heads after. The first gather and the last return are beside nothing."""
    heads = heads_per_step(problem.heads_kv)
    steps = problem.heads_kv // heads
    kernel = problem.flops(direction) / steps / SPEED[direction]
    kv = (problem.ranks - 1) * 2 * problem.bytes_of(heads, HALF)
    if direction == "forward":
        return Pass(kernel, [kv] * (steps - 1) + [0], kv)
    dkv = (problem.ranks - 1) * 2 * problem.bytes_of(heads, SINGLE)
    if steps == 1:
        return Pass(kernel, [0], kv + dkv)
    return Pass(kernel, [kv] + [kv + dkv] * (steps - 2) + [dkv], kv + dkv)


def ulysses(problem: Problem, direction: str) -> Pass:
    """q, k, v one way and out the other before and after the only kernel; dout, and dq, dk, dv in the backward. With
    fewer key/value heads than ranks each goes to several."""
    heads_kv = max(problem.heads_kv, problem.ranks)
    away = (problem.ranks - 1) / problem.ranks  # a rank keeps its own part
    kernel = problem.flops(direction) / SPEED[direction]
    return Pass(kernel, [0], away * problem.bytes_of(2 * problem.heads + 2 * heads_kv, HALF))


METHODS: dict[str, Callable[[Problem, str], Pass]] = {
    "ring": ring,
    "all-gather": allgather,
    "Ulysses": ulysses,
}


def smallest_local(name: str, problem: Problem, direction: str, bandwidth: float) -> int:
    """The shard from which on communication hides beside the kernels of its step, or for Ulysses, which hides nothing,
    takes at most a tenth of the kernels' time. Kernels grow with the square of the length, bytes with the length."""
    found = METHODS[name](problem, direction)
    sent = max(found.beside) or found.exposed / TOLERATED
    return math.ceil(round(problem.local * sent / bandwidth / found.kernel, 3))


def problems(local: int) -> list[Problem]:
    return [Problem(n, local, 32, heads_kv) for heads_kv in (32, 8) for n in (2, 8, 64)]


def possible(name: str, problem: Problem) -> bool:
    return name != "Ulysses" or problem.heads % problem.ranks == 0


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def pass_table(direction: str, local: int) -> str:
    """One row for each function, heads and number of ranks."""
    rows = []
    for name, method in METHODS.items():
        for problem in problems(local):
            if not possible(name, problem):
                continue
            found = method(problem, direction)
            sent = max(found.beside) or found.exposed
            rows.append(
                [
                    f"{name}, {problem.heads}/{problem.heads_kv}",
                    str(problem.ranks),
                    str(len(found.beside)),
                    f"{sent / 1e6:,.0f}",
                    *(milliseconds(sent / bandwidth) for bandwidth in NETWORKS.values()),
                    milliseconds(found.kernel),
                    f"{found.exposed / 1e6:,.0f}",
                    *(f"{found.share(bandwidth):.0%}" for bandwidth in NETWORKS.values()),
                ]
            )
    title = f"{direction.capitalize()}, heads"
    header = [title, "GPUs", "steps", "MB per step", *(f"{name}, ms" for name in NETWORKS)]
    header += ["kernels, ms", "exposed MB", *(f"share in kernels, {name}" for name in NETWORKS)]
    return markdown_table(header, rows)


def length_table() -> str:
    """The smallest local lengths."""
    rows = []
    for name in METHODS:
        for problem in problems(8192):
            if possible(name, problem):
                lengths = [
                    f"{smallest_local(name, problem, direction, bandwidth):,}"
                    for bandwidth in NETWORKS.values()
                    for direction in SPEED
                ]
                heads = f"{name}, {problem.heads}/{problem.heads_kv}"
                rows.append([heads, str(problem.ranks), *lengths])
    columns = [f"{network}, {direction}" for network in NETWORKS for direction in SPEED]
    return markdown_table(["Smallest shard in tokens, heads", "GPUs", *columns], rows)


def blocks(local: int) -> dict[str, str]:
    made = {f"context_{direction}": pass_table(direction, local) for direction in SPEED}
    return {**made, "context_length": length_table()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.context_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--local", type=int, default=8192, help="tokens of a rank's shard")
    parser.add_argument("--write", type=Path, help="file whose blocks to fill")
    args = parser.parse_args(argv)
    made = blocks(args.local)
    if args.write:
        update_file(args.write, made)
    else:
        print("\n\n".join(made.values()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
