"""The rules of the house: which layer may include which, and how long files and functions may be."""

import ast
import re
from pathlib import Path

import pytest
from variants import generate
from variants.table import all_rows

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
CPP_FILES = sorted(
    path for suffix in ("h", "cpp", "cuh", "cu") for path in CSRC.rglob(f"*.{suffix}")
)
PYTHON_FILES = sorted(
    [
        path
        for folder in ("flash3", "csrc", "build_tools", "tests", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
    ]
    + [ROOT / "setup.py"]
)
KERNEL_FOLDERS = {
    "common": {"common"},
    "attention": {"attention", "common"},
    "forward": {"forward", "attention", "common"},
    "backward": {"backward", "attention", "common"},
    "fp8": {"fp8", "forward", "attention", "common"},
    "merge": {"merge"},
    "quantize": {"quantize", "common"},
    "sink": {"sink"},
}
# What device code sees of the host: the structs that cross, the row's types, and the check of a CUDA call.
SHARED_WITH_KERNELS = {"params.h", "plan.h", "merge.h", "quantize.h", "sink.h", "cuda_check.h"}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAX_SCHEDULE_LINES = 150  # a main loop written out as straight-line phases

INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.MULTILINE)


def name(path):
    return str(path.relative_to(ROOT))


def includes(path):
    """(is_own, target) of every include directive."""
    return [(quote == '"', target) for quote, target in INCLUDE.findall(path.read_text())]


def layer(path):
    return path.relative_to(CSRC).parts[0]


def is_torch_or_python(target):
    return target.startswith(("torch/", "ATen/", "c10/", "pybind11/")) or target == "Python.h"


def is_cutlass(target):
    return target.startswith(("cutlass/", "cute/"))


def in_layer(target, folder):
    """Whether an include written in csrc/api or csrc/launch names a file of ``folder``."""
    return (CSRC / folder / target).is_file() or target.startswith(f"{folder}/")


def test_the_sources_are_found():
    assert {layer(path) for path in CPP_FILES} >= {"api", "launch", "kernels"}
    assert len(PYTHON_FILES) > 20


@pytest.mark.parametrize("path", [p for p in CPP_FILES if layer(p) == "api"], ids=name)
def test_api_sees_launch_and_torch_but_no_kernel(path):
    for own, target in includes(path):
        assert not is_cutlass(target), target
        if own:
            assert in_layer(target, "api") or in_layer(target, "launch"), target


@pytest.mark.parametrize("path", [p for p in CPP_FILES if layer(p) == "launch"], ids=name)
def test_launch_is_plain_cpp(path):
    for own, target in includes(path):
        assert not is_cutlass(target), target
        assert not is_torch_or_python(target), target
        if own:
            assert in_layer(target, "launch"), target


@pytest.mark.parametrize("path", [p for p in CPP_FILES if layer(p) == "kernels"], ids=name)
def test_kernels_see_no_torch_and_only_their_neighbours(path):
    folder = path.relative_to(CSRC / "kernels").parts[0]
    for own, target in includes(path):
        assert not is_torch_or_python(target), target
        if own:
            allowed = (
                target in SHARED_WITH_KERNELS or target.split("/")[0] in KERNEL_FOLDERS[folder]
            )
            assert allowed, f"{target} from kernels/{folder}"


@pytest.mark.parametrize("path", CPP_FILES, ids=name)
def test_own_includes_exist(path):
    roots = [CSRC / "kernels", CSRC / "launch", CSRC, path.parent]
    for own, target in includes(path):
        if own:
            assert any((root / target).is_file() for root in roots), target


def test_generated_sources_enter_kernels_by_the_launch_headers():
    for row in all_rows():
        own = [
            target for quote, target in INCLUDE.findall(generate.row_source(row)) if quote == '"'
        ]
        assert own in (["forward/launch.cuh"], ["fp8/launch.cuh"], ["backward/launch.cuh"])
    assert INCLUDE.findall(generate.tables_source(all_rows())) == [('"', "plan.h")]


@pytest.mark.parametrize("path", [p for p in PYTHON_FILES if p.parent.name == "flash3"], ids=name)
def test_package_imports_nothing_from_the_repository_around_it(path):
    outside = {"build_tools", "variants", "tests", "benchmarks", "examples"}
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module]
        assert not {module.split(".")[0] for module in modules} & outside


@pytest.mark.parametrize("path", CPP_FILES + PYTHON_FILES, ids=name)
def test_file_is_short_enough(path):
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", PYTHON_FILES, ids=name)
def test_python_functions_are_short_enough(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno + 1 <= MAX_FUNCTION_LINES, node.name


def cpp_functions(text):
    """(first line, number of lines) of functions, found by the formatter's indentation.

    A body opens with a line that ends in ``{`` and closes with a ``}`` at the indentation of the function: none for
    free functions, two spaces for members.
    """
    found = []
    lines = text.splitlines()
    for indent in ("", "  "):
        start, opened = None, False
        for number, line in enumerate(lines):
            starts = line.startswith(indent) and line[len(indent) : len(indent) + 1] not in (
                "",
                " ",
                "#",
                "/",
                "}",
            )
            if not opened and starts:
                start = number
            if not opened and line.endswith(";"):
                start = None  # a statement or a declaration
            if start is not None and not opened and line.endswith("{") and number >= start:
                signature = " ".join(lines[start : number + 1])
                opened = "(" in signature and not re.match(
                    r"\s*(namespace|struct|class|enum|extern)\b", signature
                )
                start = start if opened else None
            elif opened and line.rstrip(";") == indent + "}":
                found.append((lines[start].strip(), number - start + 1))
                start, opened = None, False
    return found


def test_cpp_function_finder_sees_free_functions_and_members():
    text = "int f(int a,\n      int b) {\n  return a;\n}\nstruct S {\n  void g() {\n    h();\n  }\n};\n"
    assert cpp_functions(text) == [("int f(int a,", 4), ("void g() {", 3)]


@pytest.mark.parametrize("path", CPP_FILES, ids=name)
def test_cpp_functions_are_short_enough(path):
    limit = MAX_SCHEDULE_LINES if path.name.startswith("consumer") else MAX_FUNCTION_LINES
    long = [(first, count) for first, count in cpp_functions(path.read_text()) if count > limit]
    assert long == []
