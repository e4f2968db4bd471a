"""How the error of the float8 forward grows with the number of keys, with sums of P V in one and in two levels:

    python -m benchmarks.fp8_growth --out results

Entries are N(0, 1), 128 queries of 4 heads attend to all keys. An error is the RMS of the difference from float64 on
the 16-bit inputs, over the RMS of the right output, which itself falls with the number of keys.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import flash3
from flash3 import checks_fp8, reference

from .machine import describe_machine
from .report import markdown_table, seqlen_title

QUERIES, HEADS = 128, 4
LEVELS = {0: "one level", 1: "two levels"}  # promote_every


def relative_errors(head_dim: int, keys: int, device: torch.device) -> dict[int, float]:
    """promote_every -> error."""
    generator = torch.Generator(device).manual_seed(keys)

    def randn(rows: int) -> torch.Tensor:
        size = (1, rows, HEADS, head_dim)
        return torch.randn(size, generator=generator, device=device).bfloat16()

    q, k, v = randn(QUERIES), randn(keys), randn(keys)
    right, _ = reference.attention_forward(
        q.double(), k.double(), v.double(), head_dim**-0.5, False
    )
    levels = [p for p in LEVELS if p == 0 or head_dim <= checks_fp8.TWO_LEVEL_HEAD_DIM]
    found = {}
    for promote_every in levels:
        out = flash3.flash_attn_fp8_func(q, k, v, promote_every=promote_every)
        difference = (out.double() - right).square().mean()
        found[promote_every] = (difference / right.square().mean()).sqrt().item()
    return found


def table(rows: list[dict]) -> str:
    """A line for each head_dim and way to sum, a column for each number of keys."""
    lengths = sorted({row["keys"] for row in rows})
    lines = []
    for head_dim in sorted({row["head_dim"] for row in rows}):
        for promote_every, label in LEVELS.items():
            errors = {
                row["keys"]: row["error"]
                for row in rows
                if (row["head_dim"], row["promote_every"]) == (head_dim, promote_every)
            }
            if errors:
                line = [f"{100 * errors[n]:.2f} %" if n in errors else "n/a" for n in lengths]
                lines.append([f"d{head_dim}, {label}", *line])
    return markdown_table(["error; keys", *map(seqlen_title, lengths)], lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fp8_growth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    numbers = {"type": lambda text: [int(n) for n in text.split(",")]}
    parser.add_argument("--head-dims", default=[64, 128, 256], **numbers)
    lengths = [1024, 4096, 16384, 65536, 131072]
    parser.add_argument("--keys", default=lengths, help="1024,...,131072", **numbers)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder for fp8-growth.json and .md")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    rows = [
        {"head_dim": head_dim, "keys": keys, "promote_every": promote_every, "error": error}
        for head_dim in args.head_dims
        for keys in args.keys
        for promote_every, error in relative_errors(head_dim, keys, device).items()
    ]
    text = table(rows)
    print(text)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        result = {"schema": 1, "command": "fp8_growth", "machine": describe_machine(device)}
        stored = json.dumps({**result, "rows": rows}, indent=1) + "\n"
        (args.out / "fp8-growth.json").write_text(stored)
        (args.out / "fp8-growth.md").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
