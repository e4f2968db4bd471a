"""What a result file says about the machine it comes from; every probe may fail and say so."""

import datetime
import os
import platform
import subprocess
from pathlib import Path

import torch

GPU_FIELDS = (
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)


def command_output(*command: str) -> str | None:
    """Standard output of a short command, or None when it is missing or fails."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def gpu_state(device: torch.device) -> dict[str, str]:
    """Driver, clocks (MHz), power (W) and temperature (C) by nvidia-smi; {} where it has none."""
    if device.type != "cuda":
        return {}
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    index = f"GPU-{uuid}" if uuid else str(device.index or 0)
    query = f"--query-gpu={','.join(GPU_FIELDS)}"
    line = command_output("nvidia-smi", f"--id={index}", query, "--format=csv,noheader,nounits")
    return dict(zip(GPU_FIELDS, line.split(", "), strict=False)) if line else {}


def git_commit() -> str | None:
    """The commit, with "-dirty" when tracked files differ; FLASH3_COMMIT names it for a copy of the tree."""
    if named := os.environ.get("FLASH3_COMMIT"):
        return named
    return command_output("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def describe_machine(device: torch.device) -> dict:
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or "cpu",
        "device_type": device.type,
        "multiprocessors": (
            torch.cuda.get_device_properties(device).multi_processor_count if cuda else None
        ),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "flash3_build": flash3_build(),
        "git_commit": git_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def flash3_build() -> dict | None:
    """build_info of the compiled module, None where only the Python package is installed."""
    try:
        from flash3 import _C
    except ImportError:
        return None
    return {key: str(value) for key, value in _C.build_info().items()}
