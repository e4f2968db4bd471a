"""Markers, the header that says which tiers can run, and the skips of the GPU tier."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# An installed flash3 is what is tested; the checkout serves what is not installed (benchmarks, build_tools, and flash3
# itself where the kernels were built in place or nothing was installed).
ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT] + [str(ROOT)]

from gpu_tier import row_built, why_no_gpu_tier  # noqa: E402

import flash3  # noqa: E402

settings.register_profile(
    "flash3",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("flash3")

GPU_TIER = Path(__file__).parent / "gpu"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a Hopper GPU and the built kernels")
    config.addinivalue_line("markers", "slow: seconds, not milliseconds")

    # The tensors of the host tier are tiny: more threads only wait for each other, for long where cores are busy.
    torch.set_num_threads(1)


def pytest_report_header() -> str:
    reason = why_no_gpu_tier()
    if reason is None:
        from flash3 import _C

        gpu = f"runs, {len(_C.variants())} kernel rows on {torch.cuda.get_device_name()}"
    else:
        gpu = f"skipped, {reason}"
    return f"flash3 {flash3.__version__} from {Path(flash3.__file__).parent}; host tier runs; GPU tier {gpu}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_no_gpu_tier()
    for item in items:
        if GPU_TIER in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=f"GPU tier: {reason}"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def flash3_rows():
    """flash3_rows(dtype, head_dim, causal, passes=("fwd", "bwd"), layout="dense"): skips the test if a row it needs is
    not built. In place of causal, the word of the table: "full", "causal" or "local"."""

    def require(
        dtype, head_dim: int, mask: bool | str, passes=("fwd", "bwd"), layout: str = "dense"
    ) -> None:
        for pass_name in passes:
            if not row_built(pass_name, dtype, head_dim, mask, layout):
                word = mask if isinstance(mask, str) else "causal" if mask else "full"
                pytest.skip(f"not built: {pass_name} {dtype} head_dim {head_dim} {word} {layout}")

    return require
