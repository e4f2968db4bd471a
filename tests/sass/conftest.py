"""The sass tier: compiled rows, read back as machine code. It needs nvcc and no GPU.

The rows are the ones that an install on this machine builds (FLASH3_VARIANTS, or the default); objects that `make
build` left in build/kernels are used again if they are up to date.
"""

import os
from pathlib import Path

import pytest
from variants.table import is_fp8

from build_tools import kernels, plan, ptxas, sass, toolchain
from build_tools.jobs import max_jobs

KERNELS = Path(__file__).parents[2] / "build" / "kernels"


def pytest_generate_tests(metafunc):
    if "row" in metafunc.fixturenames:
        rows, _ = plan.choose_rows(os.environ.get("FLASH3_VARIANTS", ""), toolchain.has_hopper_gpu)
        metafunc.parametrize("row", rows, ids=lambda row: row.name, scope="session")


@pytest.fixture(scope="session")
def toolkit():
    found = toolchain.find_toolkit()
    if found is None:
        pytest.skip("nvcc was not found: the sass tier compiles kernels")
    return found


@pytest.fixture(scope="session")
def objects(toolkit):
    """Objects by row name."""
    rows, _ = plan.choose_rows(os.environ.get("FLASH3_VARIANTS", ""), toolchain.has_hopper_gpu)
    built = kernels.build(rows, KERNELS, toolkit, max_jobs(), kernels.say)
    return {path.stem: path for path in built}


@pytest.fixture(scope="session")
def report(objects, row):
    """What ptxas said about the row."""
    return ptxas.read(objects[row.name].with_suffix(".log"))


@pytest.fixture(scope="session")
def functions(objects, row):
    """The row's kernels as machine code, by name."""
    if sass.find_cuobjdump() is None:
        pytest.skip("cuobjdump was not found in the CUDA toolkit, on PATH or in triton")
    return {function.name: function for function in sass.read(objects[row.name])}


@pytest.fixture(scope="session")
def main_kernel(functions, kernel_name):
    """The kernel that does the row's GEMMs."""
    return functions[kernel_name]


@pytest.fixture(scope="session")
def kernel_name(row):
    return "fp8_kernel" if is_fp8(row) else f"{row.name.split('_')[0]}_kernel"
