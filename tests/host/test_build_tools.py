"""How an install looks at the machine and decides: toolkit, torch, rows, jobs, headers, backend."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from variants import generate

from build_tools import (
    build_log,
    check_text,
    environment,
    fetch_cutlass,
    flags,
    jobs,
    plan,
    run_tests,
    toolchain,
)

ROOT = Path(__file__).parents[2]
GIB = 2**30
CUDA_TORCH = toolchain.Torch("2.12.0+cu130", (13, 0))
CUDA_13 = toolchain.Toolkit(Path("/opt/cuda"), Path("/opt/cuda/bin/nvcc"), (13, 0))


def make_toolkit(home, release="13.0", header=True):
    """A folder that looks like a CUDA toolkit, with an nvcc that states its release."""
    (home / "bin").mkdir(parents=True)
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    if header:
        (home / "include").mkdir()
        (home / "include" / "cuda_runtime.h").write_text("")
    return home.resolve()


@pytest.fixture
def no_default_toolkit(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "DEFAULT_CUDA_HOME", tmp_path / "absent")


@pytest.mark.usefixtures("no_default_toolkit")
class TestToolkit:
    def test_cuda_home_comes_first(self, tmp_path):
        named = make_toolkit(tmp_path / "named", "12.9")
        on_path = make_toolkit(tmp_path / "on_path")
        found = toolchain.find_toolkit(
            {"CUDA_HOME": str(named), "PATH": f"{on_path}/bin:/usr/bin:/bin"}
        )
        assert (found.home, found.version) == (named, (12, 9))

    def test_wrapper_script_on_path_is_not_a_toolkit(self, tmp_path, monkeypatch):
        make_toolkit(tmp_path / "wrapper", header=False)
        real = make_toolkit(tmp_path / "real")
        monkeypatch.setattr(toolchain, "DEFAULT_CUDA_HOME", real)
        found = toolchain.find_toolkit({"PATH": f"{tmp_path}/wrapper/bin:/usr/bin:/bin"})
        assert found.home == real

    def test_symlink_on_path_leads_to_its_toolkit(self, tmp_path):
        real = make_toolkit(tmp_path / "real")
        (tmp_path / "links" / "bin").mkdir(parents=True)
        (tmp_path / "links" / "bin" / "nvcc").symlink_to(real / "bin" / "nvcc")
        found = toolchain.find_toolkit({"PATH": f"{tmp_path}/links/bin:/usr/bin:/bin"})
        assert found.home == real

    def test_folder_whose_nvcc_does_not_run_is_passed_over(self, tmp_path):
        broken = make_toolkit(tmp_path / "broken")
        (broken / "bin" / "nvcc").write_text("#!/bin/sh\nexit 1\n")
        assert toolchain.find_toolkit({"CUDA_HOME": str(broken), "PATH": "/nowhere"}) is None

    def test_nothing_to_find(self):
        assert toolchain.find_toolkit({"PATH": "/nowhere"}) is None


@pytest.mark.parametrize(
    ("toolkit", "torch", "words"),
    [
        (CUDA_13, None, ["torch is not installed", "pip install torch"]),
        (CUDA_13, toolchain.Torch("2.9.1", (12, 8)), ["older than 2.10"]),
        (CUDA_13, toolchain.Torch("2.12.0+cpu", None), ["CPU build", "https://pytorch.org"]),
        (None, CUDA_TORCH, ["no CUDA toolkit", "install CUDA 13.0", "CUDA_HOME"]),
        (
            toolchain.Toolkit(Path("/old"), Path("/old/bin/nvcc"), (12, 8)),
            CUDA_TORCH,
            ["nvcc 12.8 in /old does not fit", "install CUDA 13.x", "torch for CUDA 12.x"],
        ),
        (
            toolchain.Toolkit(Path("/old"), Path("/old/bin/nvcc"), (11, 8)),
            CUDA_TORCH,
            ["nvcc 11.8 in /old is too old"],
        ),
    ],
)
def test_what_is_missing_is_said_in_one_line_with_its_remedy(toolkit, torch, words):
    line = toolchain.missing(toolkit, torch)
    assert "\n" not in line
    assert all(word in line for word in words), line


def test_nothing_is_missing_where_majors_agree():
    minor_differs = toolchain.Torch("2.14.1+cu132", (13, 2))
    assert toolchain.missing(CUDA_13, CUDA_TORCH) is None
    assert toolchain.missing(CUDA_13, minor_differs) is None


def test_unset_filter_means_all_rows_beside_a_hopper_gpu():
    rows, why = plan.choose_rows("", lambda: True)
    assert rows == generate.select("all")
    assert "a Hopper GPU is visible" in why


def test_unset_filter_means_the_core_set_elsewhere_and_says_how_to_get_all():
    rows, why = plan.choose_rows(" ", lambda: False)
    assert rows == generate.select("core")
    assert "no Hopper GPU" in why
    assert "FLASH3_VARIANTS=all" in why
    assert "\n" not in why


def test_named_filter_does_not_ask_for_a_gpu():
    rows, why = plan.choose_rows("bwd,hd64", lambda: pytest.fail("looked for a GPU"))
    assert rows == generate.select("bwd,hd64")
    assert 'FLASH3_VARIANTS="bwd,hd64"' in why


def test_prebuilt_folder_is_read_in_the_order_of_its_table(tmp_path):
    rows = generate.select("core")
    generate.generate(rows, tmp_path / "generated")
    (tmp_path / "fwd_of_another_build.o").write_text("")
    names = [*(row.name for row in rows), *(Path(source).stem for source in generate.ROWLESS)]
    for name in names:
        (tmp_path / f"{name}.o").write_text("")
    assert [path.stem for path in plan.prebuilt_objects(tmp_path)] == names


def test_prebuilt_folder_without_a_table_or_an_object_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"generated/tables\.cpp is not there"):
        plan.prebuilt_objects(tmp_path)
    row = generate.select("core")[0]
    generate.generate([row], tmp_path / "generated")
    with pytest.raises(ValueError, match=f"{row.name}.o"):
        plan.prebuilt_objects(tmp_path)


def test_host_sources_hold_both_layers_and_no_kernel():
    sources = plan.host_sources()
    assert {Path(source).parts[1] for source in sources} == {"api", "launch"}
    assert all(source.endswith(".cpp") and (ROOT / source).is_file() for source in sources)


@pytest.mark.parametrize(
    ("cores", "memory", "expected"),
    [(2, 24 * GIB, 2), (64, 24 * GIB, 8), (16, 128 * GIB, 16), (8, 2 * GIB, 1), (1, 0, 1)],
)
def test_jobs_follow_cores_and_memory(cores, memory, expected):
    assert jobs.jobs_for(cores, memory) == expected


def test_max_jobs_is_obeyed_or_refused():
    assert jobs.max_jobs({"MAX_JOBS": "5"}) == 5
    assert jobs.max_jobs({}) >= 1
    for wrong in ("0", "-1", "many"):
        with pytest.raises(ValueError, match="MAX_JOBS"):
            jobs.max_jobs({"MAX_JOBS": wrong})


def test_kernels_are_compiled_for_hopper_alone_and_without_torch(tmp_path):
    command = flags.kernel_command(Path("nvcc"), tmp_path, tmp_path / "a.cu", tmp_path / "a.o")
    assert [word for word in command if "compute_" in word] == ["arch=compute_90a,code=sm_90a"]
    assert not any("torch" in word.lower() or "python" in word.lower() for word in command)


def test_host_files_target_the_stable_abi_and_cudart_is_static():
    assert "-DTORCH_TARGET_VERSION=0x020a000000000000" in flags.HOST
    assert "-DUSE_CUDA" in flags.HOST
    assert "-lcudart_static" in flags.LINK
    assert not any(word in ("-lcuda", "-lcudart") for word in flags.LINK)


def test_named_cutlass_folder_is_used_without_fetching(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_cutlass, "fetch", lambda: pytest.fail("fetched"))
    monkeypatch.setenv("FLASH3_CUTLASS_DIR", str(tmp_path))
    with pytest.raises(fetch_cutlass.CutlassError, match="FLASH3_CUTLASS_DIR"):
        fetch_cutlass.include_dir()
    header = tmp_path / "include" / "cutlass" / "version.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 7\n#define CUTLASS_PATCH 1\n")
    assert fetch_cutlass.include_dir() == tmp_path / "include"
    assert fetch_cutlass.version(tmp_path / "include") == "4.7.1"


def make_wheel(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "cutlass_library/source/include/cutlass/version.h", "#define CUTLASS_MAJOR 4\n"
        )
        archive.writestr("cutlass_library/source/tools/util/tool.h", "")
        archive.writestr("cutlass_library/manifest.py", "")
        archive.writestr("nvidia_cutlass-4.2.0.0.dist-info/licenses/LICENSE.txt", "BSD")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_only_headers_and_their_licence_are_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_cutlass, "SHA256", make_wheel(tmp_path / "w.whl"))
    destination = tmp_path / "cutlass"
    assert not fetch_cutlass.is_fetched(destination)
    fetch_cutlass.fetch(tmp_path / "w.whl", destination)
    files = {
        str(path.relative_to(destination)) for path in destination.rglob("*") if path.is_file()
    }
    assert files == {"include/cutlass/version.h", "LICENSE.txt", fetch_cutlass.STAMP}
    assert fetch_cutlass.is_fetched(destination)


def test_wheel_with_another_hash_is_refused(tmp_path):
    make_wheel(tmp_path / "w.whl")
    with pytest.raises(fetch_cutlass.CutlassError, match="expected f9599ada"):
        fetch_cutlass.fetch(tmp_path / "w.whl", tmp_path / "cutlass")
    assert not (tmp_path / "cutlass").exists()


def test_backend_requires_nothing_and_finds_torch_when_pip_hides_it(tmp_path):
    # What pip's isolation does: a sitecustomize.py ahead on PYTHONPATH takes site-packages out of sys.path.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, sysconfig\n"
        "hidden = {sysconfig.get_paths()[kind] for kind in ('purelib', 'platlib')}\n"
        "sys.path[:] = [path for path in sys.path if path not in hidden]\n"
    )
    code = (
        "import importlib.util, sys\n"
        "assert importlib.util.find_spec('torch') is None\n"
        "import flash3_build as backend\n"
        "for hook in ('wheel', 'editable', 'sdist'):\n"
        "    assert getattr(backend, 'get_requires_for_build_' + hook)() == [], hook\n"
        "assert 'torch' not in sys.modules\n"
        "assert importlib.util.find_spec('torch')\n"
    )
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'build_tools'}"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_optional_dependencies_are_read_from_pyproject():
    requirements = environment.extras(["build", "test"])
    assert any(requirement.startswith("pytest") for requirement in requirements)
    assert len(requirements) == len(set(requirements))


def test_build_log_keeps_everything_and_shows_progress(tmp_path, capfd):
    log = build_log.BuildLog(tmp_path / "logs" / "build.log")
    with log:
        log.phase = "compile"
        os.write(
            1, b"flash3-ninja [3/7] nvcc -c x.cu -o /b/fwd_bf16_hd64_full.o\nx.cu(3): error: no\n"
        )
        subprocess.run([sys.executable, "-c", "import sys; print('from a child', file=sys.stderr)"])
    text = log.path.read_text()
    assert "from a child" in text
    shown = capfd.readouterr().out
    assert "flash3 compile [0:00] 3/7 fwd_bf16_hd64_full" in shown
    assert "from a child" not in shown
    assert log.errors() == "x.cu(3): error: no"


def test_closing_line_counts_tiers_and_names_the_reason_of_the_others():
    counter = run_tests.TierCounter()
    for nodeid, outcome in [
        ("tests/host/test_a.py::x", "passed"),
        ("tests/host/test_a.py::y", "failed"),
    ]:
        counter.pytest_runtest_logreport(
            type("R", (), {"when": "call", "outcome": outcome, "nodeid": nodeid})
        )
    line = counter.line({"sass": "no nvcc", "gpu": "no Hopper GPU is visible"}, 90)
    assert line == (
        "flash3 tests: host 1 failed, 1 passed; sass not run (no nvcc); gpu not run (no Hopper GPU is visible); "
        "1.5 minutes"
    )


def test_text_check_corrects_whitespace_and_names_what_it_cannot_correct(tmp_path):
    path = tmp_path / "x.md"
    path.write_text("one  \r\ntwo\n\n\n")
    assert check_text.faults(path, fix=True) == ["has stray whitespace, corrected"]
    assert path.read_bytes() == b"one\ntwo\n"
    assert check_text.faults(path, fix=False) == []
    path.write_text("<<<<<<< ours\n" + "x" * check_text.MAX_BYTES + "\n")
    assert len(check_text.faults(path, fix=True)) == 2
