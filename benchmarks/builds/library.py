"""A folder of built kernels as a shared library of its own, loaded by ctypes.

No torch operator is registered, so libraries of several builds live in one process. shim.cpp is the C++ side.
"""

import ctypes
import os
import shutil
import subprocess
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path

from build_tools import flags, kernels, plan, toolchain

PASSES = ("fwd", "bwd")  # by the numbers of Flash3Pass
DTYPES = {"f16": "fp16", "bf16": "bf16"}  # the table's word -> the benchmarks'
INTERFACE = 2  # kInterface of shim.cpp
SHIM = Path("benchmarks") / "builds" / "shim.cpp"
# Every other name stays inside: dlopen would otherwise share the inline variables of two builds (STB_GNU_UNIQUE).
EXPORTS = "{ global: flash3_builds_*; local: *; };\n"


class LinkError(RuntimeError):
    """A folder did not become a library; the message holds the compiler's."""


class RowInfo(Structure):
    """Flash3Row."""

    _fields_ = [
        *[(name, c_char_p) for name in ("name", "dtype", "mask", "why")],
        *[(name, c_int) for name in ("head_dim", "head_dim_v", "tile_m", "tile_n")],
    ]


class Call(Structure):
    """Flash3Call."""

    _fields_ = [
        *[(name, c_int) for name in ("row", "batch", "seqlen_q", "seqlen_k", "num_heads_q")],
        *[(name, c_int) for name in ("num_heads_kv", "head_dim", "head_dim_v")],
        *[(name, c_int) for name in ("num_sms", "deterministic")],
        ("softmax_scale", c_float),
        *[(name, c_void_p) for name in ("q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv")],
        *[(name, c_void_p) for name in ("workspace", "stream")],
    ]


@dataclass(frozen=True)
class Row:
    """A row as its build's table has it; ``dtype`` is the benchmarks' word, ``index`` its place in its pass's table."""

    mode: str  # "fwd" | "bwd"
    index: int
    name: str
    dtype: str
    head_dim: int  # of q and k
    head_dim_v: int
    causal: bool
    tile: str  # "128x176"
    why: str


@dataclass(frozen=True)
class Build:
    """A folder that build_tools/kernels.py made, and the source tree that its headers come from."""

    label: str
    folder: Path
    tree: Path


def source_tree(folder: Path) -> Path:
    """The tree that the folder was built from, by its depfiles; this repository where that one is gone."""
    for depfile in sorted(folder.glob("*.d")):
        for path in map(Path, kernels.dependencies(depfile)):
            if path.parts[-3:] == ("csrc", "launch", "params.h") and path.is_file():
                return path.parents[2]
    return flags.ROOT


def find_builds(folders: list[Path], trees: list[Path] | None) -> list[Build]:
    """The builds to compare. A label is the folder's name, or the folder as given where two have that name.

    ``trees``: one for all, one for each folder, or None for what the folders themselves say.
    """
    if trees is None:
        trees = [source_tree(folder) for folder in folders]
    elif len(trees) == 1:
        trees = trees * len(folders)
    if len(trees) != len(folders):
        raise ValueError(f"--tree: {len(trees)} trees for {len(folders)} folders")
    if len(set(folders)) != len(folders):
        raise ValueError("a folder is given twice")
    names = [folder.resolve().name for folder in folders]
    labels = [
        name if names.count(name) == 1 else str(folder)
        for name, folder in zip(names, folders, strict=True)
    ]
    return [Build(*values) for values in zip(labels, folders, trees, strict=True)]


def link_command(build: Build, toolkit: toolchain.Toolkit, exports: Path, out: Path) -> list[str]:
    """The command that makes ``out`` of a build. The tree's own shim is taken, if it has one: it knows its params.h.

    Raises ValueError when the folder or the tree is not what it should be.
    """
    launch = build.tree / "csrc" / "launch"
    if not (launch / "plan.cpp").is_file():
        raise ValueError(f"--tree {build.tree}: csrc/launch/plan.cpp is not there")
    shim = build.tree / SHIM
    sources = [
        shim if shim.is_file() else flags.ROOT / SHIM,
        launch / "plan.cpp",
        build.folder / "generated" / "tables.cpp",
    ]
    return [
        os.environ.get("CXX") or "g++",
        *("-std=c++20", "-O2", "-Wall", "-shared", "-fPIC"),
        *(f"-I{launch}", f"-I{toolkit.home / 'include'}"),
        *map(str, [*sources, *plan.row_objects(build.folder)]),
        *("-o", str(out), "-Wl,-z,defs", f"-Wl,--version-script={exports}"),
        f"-L{toolkit.home / 'lib64'}",
        *flags.CUDART,
    ]


def link(build: Build, toolkit: toolchain.Toolkit, folder: Path) -> Path:
    """The library of a build, made in ``folder`` under a name of its own: dlopen knows files by their path.

    Raises LinkError with the compiler's first errors.
    """
    out = folder / f"{len(list(folder.glob('*.so')))}.so"
    exports = folder / "exports.map"
    exports.write_text(EXPORTS)
    command = link_command(build, toolkit, exports, out)
    if shutil.which(command[0]) is None:
        raise LinkError(f"no C++ compiler {command[0]}; set CXX")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.splitlines()
        words = ("error:", "undefined reference", "multiple definition")
        errors = [line for line in lines if any(word in line for word in words)]
        raise LinkError(f"{build.folder} with {build.tree}:\n" + "\n".join((errors or lines)[:8]))
    return out


class Library:
    """The rows of one build, callable by name of nothing but themselves: no dispatch chooses among them."""

    def __init__(self, build: Build, path: Path):
        self.build = build
        self._c = ctypes.CDLL(str(path))
        functions = {
            "row": [c_int, c_int, POINTER(RowInfo)],
            "workspace": [c_int, POINTER(Call), POINTER(c_size_t)],
            "launch": [c_int, POINTER(Call)],
        }
        for name, arguments in functions.items():
            getattr(self._c, f"flash3_builds_{name}").argtypes = arguments
        self._c.flash3_builds_error.restype = c_char_p
        found = self._c.flash3_builds_interface()
        if found != INTERFACE:
            raise LinkError(f"{build.tree / SHIM} has interface {found}, this tool {INTERFACE}")
        rows = (
            self._row(mode, index)
            for number, mode in enumerate(PASSES)
            for index in range(self._c.flash3_builds_count(number))
        )
        # The interface has no place for where packed sequences lie.
        self.rows = [row for row in rows if not row.name.endswith("_packed")]

    def name(self, row: Row) -> str:
        """The row's name in reports, with its build's."""
        return f"{self.build.label}:{row.name}"

    def workspace_bytes(self, mode: str, call: Call) -> int:
        bytes_needed = c_size_t()
        self._try(self._c.flash3_builds_workspace, mode, byref(call), byref(bytes_needed))
        return bytes_needed.value

    def launch(self, mode: str, call: Call) -> None:
        """Queues the call on its stream. Raises RuntimeError with the C++ exception's message."""
        self._try(self._c.flash3_builds_launch, mode, byref(call))

    def _try(self, function, mode: str, *arguments) -> None:
        if function(PASSES.index(mode), *arguments):
            raise RuntimeError(self._c.flash3_builds_error().decode(errors="replace"))

    def _row(self, mode: str, index: int) -> Row:
        info = RowInfo()
        self._try(self._c.flash3_builds_row, mode, index, byref(info))
        return Row(
            mode=mode,
            index=index,
            name=info.name.decode(),
            dtype=DTYPES[info.dtype.decode()],
            head_dim=info.head_dim,
            head_dim_v=info.head_dim_v,
            causal=info.mask == b"causal",
            tile=f"{info.tile_m}x{info.tile_n}",
            why=info.why.decode(),
        )


def load(builds: list[Build], toolkit: toolchain.Toolkit, folder: Path) -> list[Library]:
    return [Library(build, link(build, toolkit, folder)) for build in builds]
