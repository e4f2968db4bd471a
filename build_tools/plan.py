"""What an install on this machine builds: decided once, before any compiler runs."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from variants import generate
from variants.table import all_rows

from build_tools import fetch_cutlass, toolchain
from build_tools.build_log import announce

ROOT = Path(__file__).resolve().parent.parent
GENERATED = "build/generated"  # relative to ROOT, as setuptools wants its sources
TABLES = f"{GENERATED}/tables.cpp"


@dataclass(frozen=True)
class BuildPlan:
    """``missing`` says why nothing can be compiled; otherwise the rest says what is."""

    missing: str | None = None
    toolkit: toolchain.Toolkit | None = None
    rows: Sequence = ()  # kernels to compile; empty if they are prebuilt
    prebuilt: Path | None = None
    prebuilt_objects: Sequence[Path] = ()
    cutlass_version: str = "unknown"
    why: str = ""  # one line: which kernels, for what reason


def make_plan(environ: dict[str, str] | os._Environ = os.environ) -> BuildPlan:
    """Look at the machine and the FLASH3_ variables. Raises ValueError for a setting that cannot be met."""
    toolkit, torch = toolchain.find_toolkit(environ), toolchain.find_torch()
    missing = toolchain.missing(toolkit, torch)
    if missing:
        return BuildPlan(missing=missing)
    cutlass = fetch_cutlass.version(fetch_cutlass.expected_dir())
    named = environ.get("FLASH3_PREBUILT_KERNELS")
    if named:
        folder = Path(named).resolve()
        objects = prebuilt_objects(folder)
        why = f"linking {len(objects)} ready kernels from {folder}"
        return BuildPlan(None, toolkit, (), folder, objects, cutlass, why)
    rows, why = choose_rows(environ.get("FLASH3_VARIANTS", ""), toolchain.has_hopper_gpu)
    return BuildPlan(None, toolkit, rows, cutlass_version=cutlass, why=why)


def choose_rows(spec: str, has_hopper_gpu) -> tuple[list, str]:
    """The rows to build and the line that says so. Unset: all beside a Hopper GPU, the core set elsewhere."""
    if spec.strip():
        rows = generate.select(spec)
        return (
            rows,
            f'building {len(rows)} of {len(all_rows())} kernels, as FLASH3_VARIANTS="{spec}" asks',
        )
    if has_hopper_gpu():
        rows = generate.select("all")
        return rows, f"building all {len(rows)} kernels, because a Hopper GPU is visible"
    rows = generate.select("core")
    return rows, (
        f"no Hopper GPU is visible: building the core set, {len(rows)} of {len(all_rows())} kernels; "
        "FLASH3_VARIANTS=all builds every one"
    )


def row_objects(folder: Path) -> list[Path]:
    """The objects of a folder that build_tools/kernels.py made, in the order of its table."""
    tables = folder / "generated" / "tables.cpp"
    if not tables.is_file():
        raise ValueError(f"kernel folder {folder}: generated/tables.cpp is not there")
    names = re.findall(r"^void launch_(\w+)\(", tables.read_text(), re.MULTILINE)
    return _objects(folder, names)


def prebuilt_objects(folder: Path) -> list[Path]:
    """Those, and after them the objects of the kernels that have no row."""
    return row_objects(folder) + _objects(
        folder, [Path(source).stem for source in generate.ROWLESS]
    )


def _objects(folder: Path, names: Sequence[str]) -> list[Path]:
    objects = [folder / f"{name}.o" for name in names]
    absent = [path.name for path in objects if not path.is_file()]
    if absent or not objects:
        raise ValueError(
            f"kernel folder {folder}: objects are absent: {', '.join(absent) or 'all'}"
        )
    return objects


def write_sources(build: BuildPlan) -> None:
    """Bring the generated files of this plan, and the CUTLASS headers if it compiles kernels, into place."""
    if build.prebuilt is None:
        fetch_cutlass.include_dir()
        generate.generate(build.rows, ROOT / GENERATED)
        return
    text = (build.prebuilt / "generated" / "tables.cpp").read_text()
    tables = ROOT / TABLES
    tables.parent.mkdir(parents=True, exist_ok=True)
    if not tables.is_file() or tables.read_text() != text:
        tables.write_text(text)


def host_sources() -> list[str]:
    """The C++ files of the host layers, relative to the root."""
    return sorted(
        str(path.relative_to(ROOT))
        for layer in ("api", "launch")
        for path in (ROOT / "csrc" / layer).glob("*.cpp")
    )


def kernel_sources(build: BuildPlan) -> list[str]:
    """The CUDA files to compile, relative to the root; none if they are prebuilt."""
    if build.prebuilt is not None:
        return []
    return [*(f"{GENERATED}/{row.name}.cu" for row in build.rows), *generate.ROWLESS]


def pybind11_includes() -> list[str]:
    """pybind11's own include folder where the package is installed."""
    spec = importlib.util.find_spec("pybind11")
    return [str(Path(spec.origin).parent / "include")] if spec and spec.origin else []


def find_ninja() -> bool:
    """Whether ninja can be run; a venv that is not activated has it beside its interpreter only."""
    beside = str(Path(sys.executable).parent)
    if beside not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = beside + os.pathsep + os.environ.get("PATH", "")
    return shutil.which("ninja") is not None


def announcing_build_py(missing: str):
    """build_py that says, in one line, why this install has no kernels."""
    from setuptools.command.build_py import build_py

    class AnnouncingBuildPy(build_py):
        def run(self) -> None:
            announce(
                f"flash3: installing without GPU kernels (CPU tensors work, by the reference path): {missing}"
            )
            super().run()

    return AnnouncingBuildPy
