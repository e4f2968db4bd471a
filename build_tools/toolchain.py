"""What this machine can build with: the CUDA toolkit, torch, a Hopper GPU. Every probe answers, none raises."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CUDA_HEADER = Path("include") / "cuda_runtime.h"
DEFAULT_CUDA_HOME = Path("/usr/local/cuda")
MIN_CUDA = (12, 5)  # has cudaGetDriverEntryPointByVersion; older ones lack C++20 or serialise wgmma
MIN_TORCH = (2, 10)  # the stable ABI that the extension is built for
HOPPER = (9, 0)


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: its folder, its nvcc and the release that this nvcc states."""

    home: Path
    nvcc: Path
    version: tuple[int, int]

    def __str__(self) -> str:
        return f"nvcc {self.version[0]}.{self.version[1]} in {self.home}"


@dataclass(frozen=True)
class Torch:
    """The torch of this environment. ``cuda`` is the CUDA release it was built for, None for a CPU build."""

    version: str
    cuda: tuple[int, int] | None

    @property
    def release(self) -> tuple[int, int]:
        major, minor = self.version.split(".")[:2]
        return int(major), int(re.match(r"\d+", minor)[0])


def find_toolkit(environ: dict[str, str] | os._Environ = os.environ) -> Toolkit | None:
    """The first CUDA toolkit with both nvcc and its headers, or None.

    A folder counts only if it holds the runtime's header: nvcc on PATH may be a wrapper script that lies outside the
    toolkit, and then its parent folder is not CUDA_HOME.
    """
    candidates = [Path(environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    on_path = shutil.which("nvcc", path=environ.get("PATH"))
    if on_path:
        candidates += [Path(on_path).parent.parent, Path(on_path).resolve().parent.parent]
    candidates.append(DEFAULT_CUDA_HOME)
    for home in candidates:
        home = home.resolve()
        nvcc = home / "bin" / "nvcc"
        if (home / CUDA_HEADER).is_file() and os.access(nvcc, os.X_OK):
            version = nvcc_version(nvcc)
            if version:
                return Toolkit(home, nvcc, version)
    return None


def nvcc_version(nvcc: Path) -> tuple[int, int] | None:
    """(13, 0) for "Cuda compilation tools, release 13.0"; None if nvcc does not run."""
    try:
        output = subprocess.run(
            [str(nvcc), "--version"], capture_output=True, text=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"release (\d+)\.(\d+)", output)
    return (int(match[1]), int(match[2])) if match else None


def find_torch() -> Torch | None:
    """The torch that this interpreter imports, or None."""
    try:
        import torch
    except (
        Exception
    ):  # a broken torch raises OSError, RuntimeError and others; all mean the same here
        return None
    cuda = re.match(r"(\d+)\.(\d+)", torch.version.cuda or "")
    return Torch(torch.__version__, (int(cuda[1]), int(cuda[2])) if cuda else None)


def has_hopper_gpu() -> bool:
    """Whether a compute capability 9.0 GPU is visible to torch."""
    try:
        import torch

        return any(
            torch.cuda.get_device_capability(i) == HOPPER for i in range(torch.cuda.device_count())
        )
    except Exception:  # no torch, no driver or a driver too old for it: no usable GPU
        return False


def missing(toolkit: Toolkit | None, torch: Torch | None) -> str | None:
    """What stands in the way of compiling the extension and how to get it, in one line; None if nothing does."""
    python = sys.executable
    if torch is None:
        return f"torch is not installed for {python}: `{python} -m pip install torch`, then install flash3 again"
    if torch.release < MIN_TORCH:
        return f"torch {torch.version} is older than {MIN_TORCH[0]}.{MIN_TORCH[1]}: `{python} -m pip install -U torch`"
    if torch.cuda is None:
        return f"torch {torch.version} is a CPU build: install a CUDA build (https://pytorch.org/get-started/locally)"
    if toolkit is None:
        want = f"{torch.cuda[0]}.{torch.cuda[1]}"
        return (
            f"no CUDA toolkit with nvcc was found: install CUDA {want} (https://developer.nvidia.com/cuda-downloads) "
            "and set CUDA_HOME to its folder if it is not /usr/local/cuda"
        )
    if toolkit.version < MIN_CUDA:
        return f"{toolkit} is too old: install CUDA {MIN_CUDA[0]}.{MIN_CUDA[1]} or newer and set CUDA_HOME"
    if toolkit.version[0] != torch.cuda[0]:
        return (
            f"{toolkit} does not fit torch {torch.version}, built for CUDA {torch.cuda[0]}.{torch.cuda[1]}: "
            f"install CUDA {torch.cuda[0]}.x and set CUDA_HOME, or a torch for CUDA {toolkit.version[0]}.x"
        )
    return None


def find_binary(name: str, toolkit: Toolkit | None = None) -> Path | None:
    """cuobjdump or nvdisasm: from the toolkit, from PATH, or from triton, which CUDA builds of torch bring along."""
    if toolkit and os.access(toolkit.home / "bin" / name, os.X_OK):
        return toolkit.home / "bin" / name
    on_path = shutil.which(name)
    if on_path:
        return Path(on_path)
    try:
        import triton
    except Exception:
        return None
    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return bundled if os.access(bundled, os.X_OK) else None
