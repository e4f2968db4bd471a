"""Compiler flags of flash3, the one place that knows them.

``setup.py`` (through torch's CUDAExtension) and the kernel builder (``build_tools/kernels.py``) both read them here, so
an object made by one is the object that the other would make.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# setmaxnreg, wgmma and TMA exist for compute_90a only; there is no PTX for other architectures to fall back on.
ARCH = ["-gencode", "arch=compute_90a,code=sm_90a"]

KERNEL = [
    "-std=c++20",
    "-O3",
    *ARCH,
    "-DNDEBUG",
    "--use_fast_math",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED",
    "-lineinfo",
    "-Xptxas=-v,--warn-on-spills",
    "-Xcompiler=-fPIC",
]

# torch's CUDAExtension adds macros that take the half-precision operators away; kernels see the same headers with and
# without torch's help.
UNDO_TORCH = [
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
]

HOST = [
    "-std=c++20",
    "-O2",
    "-fvisibility=hidden",
    "-Wall",
    # torch 2.10's stable ABI: one binary runs under every later torch. Its CUDA half hides behind USE_CUDA.
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
    "-DUSE_CUDA",
]

CUDART = ["-lcudart_static", "-ldl", "-lrt", "-lpthread"]

LINK = [
    "-Wl,--no-as-needed",
    "-ltorch",
    "-Wl,--as-needed",
    *CUDART,
    # torch loads its own cudart with global symbols; ours must not be bound to it.
    "-Wl,--exclude-libs,ALL",
    # A CPU build of torch lacks the stream functions; they are looked up when called, not when loaded.
    "-Wl,-z,lazy",
]


def kernel_includes(cutlass: Path) -> list[Path]:
    """Include folders of a kernel file: ours, then the CUTLASS headers (no torch, no Python)."""
    return [ROOT / "csrc" / "kernels", ROOT / "csrc" / "launch", cutlass]


def host_includes() -> list[Path]:
    """Include folders of a host file: ours (no CUTLASS)."""
    return [ROOT / "csrc" / "launch", ROOT / "csrc"]


def kernel_command(nvcc: Path, cutlass: Path, source: Path, output: Path) -> list[str]:
    """The command that compiles one kernel file; it leaves a depfile beside the object."""
    includes = [f"-I{folder}" for folder in kernel_includes(cutlass)]
    depfile = output.with_suffix(".d")
    return [
        str(nvcc),
        *KERNEL,
        *includes,
        "-MD",
        "-MF",
        str(depfile),
        "-c",
        str(source),
        "-o",
        str(output),
    ]
