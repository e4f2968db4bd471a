"""How many compilers may run at once."""

from __future__ import annotations

import os
from pathlib import Path

BYTES_PER_JOB = 3 * 2**30  # one nvcc on one CuTe kernel, with room for the linker


def max_jobs(environ: dict[str, str] | os._Environ = os.environ) -> int:
    """MAX_JOBS if it is set, otherwise as many as cores and free memory allow."""
    named = environ.get("MAX_JOBS", "").strip()
    if named:
        if not named.isdigit() or int(named) < 1:
            raise ValueError(f"MAX_JOBS must be a whole number of at least 1, got {named!r}")
        return int(named)
    return jobs_for(cores(), available_memory())


def jobs_for(cores: int, memory_bytes: int) -> int:
    return max(1, min(cores, memory_bytes // BYTES_PER_JOB))


def cores() -> int:
    """Cores that this process may use: its affinity, cut by a container's CPU quota."""
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        count = min(count, max(1, int(quota) // int(period)))
    return count


def available_memory() -> int:
    """Bytes that can be taken without swapping, cut by a container's limit."""
    available = BYTES_PER_JOB
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit.isdigit() and used.isdigit():
        available = min(available, max(0, int(limit) - int(used)))
    return available


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
