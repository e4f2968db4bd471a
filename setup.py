"""Build flash3: the Python package, and where the machine can compile it, the extension with the kernels.

The settings are environment variables: FLASH3_VARIANTS (which kernels: all, core, or words such as "hd128,bf16"),
FLASH3_PREBUILT_KERNELS (a folder made by build_tools/kernels.py: link its objects, compile no kernel),
FLASH3_CUTLASS_DIR (a CUTLASS checkout instead of the pinned headers) and MAX_JOBS. See CONTRIBUTING.md.
"""

import os
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT / "csrc")]

from build_tools import fetch_cutlass, flags, plan  # noqa: E402


def extension(build: plan.BuildPlan):
    """The module flash3._C: the host files, and the kernels as sources or as ready objects."""
    from torch.utils.cpp_extension import CUDAExtension

    module = CUDAExtension(
        "flash3._C",
        sources=[*plan.host_sources(), plan.TABLES, *plan.kernel_sources(build)],
        extra_objects=[str(path) for path in build.prebuilt_objects],
        # pybind11's own headers, where it is installed, come before the copy that torch ships.
        include_dirs=[*plan.pybind11_includes(), *map(str, flags.host_includes())],
        define_macros=[("FLASH3_CUTLASS_VERSION", build.cutlass_version)],
        extra_compile_args={
            "cxx": flags.HOST,
            "nvcc": [
                *flags.KERNEL,
                *flags.UNDO_TORCH,
                *(f"-I{folder}" for folder in flags.kernel_includes(fetch_cutlass.expected_dir())),
            ],
        },
        extra_link_args=flags.LINK,
    )
    # libtorch.so alone: it brings in the CPU library and, where torch has one, the CUDA library, so the module also
    # loads under a CPU build of torch. cudart is linked statically and libcuda not at all (see flags.LINK).
    module.libraries = []
    return module


def arguments() -> dict:
    build = plan.make_plan()
    if build.missing:
        return {
            "license": "BSD-3-Clause",
            "cmdclass": {"build_py": plan.announcing_build_py(build.missing)},
        }
    os.environ["CUDA_HOME"] = str(
        build.toolkit.home
    )  # before torch looks for it: its own guess trusts nvcc on PATH
    from build_tools.build_ext import build_ext_for

    return {
        "license": "BSD-3-Clause",
        "ext_modules": [extension(build)],
        "cmdclass": {"build_ext": build_ext_for(build)},
    }


if __name__ == "__main__":
    setup(**arguments())
