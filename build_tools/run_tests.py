"""Run the test tiers that this machine can run, and close with one line that says which did.

    python build_tools/run_tests.py [--tiers host,sass,gpu] [pytest arguments]

host needs nothing but torch, sass needs nvcc, gpu needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "csrc")]

from build_tools import toolchain  # noqa: E402

TIERS = ("host", "sass", "gpu")


class TierCounter:
    """A pytest plugin: outcomes by the folder under tests/ that a test lies in."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter] = defaultdict(Counter)

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            parts = Path(report.nodeid.split("::")[0]).parts
            self.outcomes[parts[1] if len(parts) > 2 else "other"][report.outcome] += 1

    def line(self, left_out: dict[str, str], seconds: float) -> str:
        words = []
        for tier in [*TIERS, *sorted(set(self.outcomes) - set(TIERS))]:
            counts = self.outcomes.get(tier)
            if counts:
                words.append(
                    f"{tier} " + ", ".join(f"{n} {word}" for word, n in sorted(counts.items()))
                )
            elif tier in left_out:
                words.append(f"{tier} not run ({left_out[tier]})")
        return f"flash3 tests: {'; '.join(words)}; {seconds / 60:.1f} minutes"


def runnable_tiers(wanted: list[str]) -> tuple[list[str], dict[str, str]]:
    """The tiers to run, and for each of the others why not."""
    left_out = {}
    if toolchain.find_toolkit() is None:
        left_out["sass"] = "no nvcc"
    if not toolchain.has_hopper_gpu():
        left_out["gpu"] = "no Hopper GPU is visible"
    left_out |= {tier: "not asked for" for tier in TIERS if tier not in wanted}
    return [tier for tier in TIERS if tier not in left_out], left_out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tiers", default=",".join(TIERS), help="tiers to run, separated by commas"
    )
    args, pytest_arguments = parser.parse_known_args()
    try:
        import pytest
    except ModuleNotFoundError:
        print("flash3: pytest is not installed: `pip install pytest hypothesis`", file=sys.stderr)
        return 1
    import flash3  # noqa: F401  the checkout, before an installed flash3 can be found

    tiers, left_out = runnable_tiers(args.tiers.split(","))
    folders = [str(ROOT / "tests" / tier) for tier in tiers if (ROOT / "tests" / tier).is_dir()]
    counter, start = TierCounter(), time.monotonic()
    status = pytest.main(
        [*folders, f"--rootdir={ROOT}", "-rfEs", *pytest_arguments], plugins=[counter]
    )
    print(counter.line(left_out, time.monotonic() - start), flush=True)
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
