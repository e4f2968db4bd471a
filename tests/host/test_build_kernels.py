"""The kernel builder: what it compiles again, and what it reads out of the compiler's words and the machine code."""

import os
import shlex
from pathlib import Path

import pytest
from variants import generate

from build_tools import kernels, ptxas, sass, toolchain

PTXAS_LOG = """\
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to a reason in \
function '_ZN6flash310bwd_kernelINS_19bwd_bf16EEEvT_'
ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function '_ZN6flash322bwd_postprocess_kernelINS_19bwd_bf16EEEvT_' for 'sm_90a'
ptxas info    : Function properties for _ZN6flash322bwd_postprocess_kernelINS_19bwd_bf16EEEvT_
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 48 registers, used 1 barriers, 16384 bytes smem
ptxas info    : Compiling entry function '_ZN6flash310bwd_kernelINS_19bwd_bf16EEEvT_' for 'sm_90a'
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
"""

FAKE_NVCC = """\
#!/bin/sh
while [ $# -gt 0 ]; do
  case "$1" in -MF) dep=$2; shift;; -o) out=$2; shift;; -c) src=$2; shift;; esac
  shift
done
if grep -q "not C++" "$src"; then echo "$src(1): error: not C++"; exit 1; fi
cp "$src" "$out"
echo "$out : $src ${0%/*}/header.cuh" > "$dep"
echo "ptxas info : Compiling entry function '_ZN6flash31kE'"
echo "ptxas info : Used 32 registers"
"""

LISTING = """\
\t\tFunction : _ZN6flash310fwd_kernelINS_20fwd_bf16_hd128_fullEEEvT_
        /*0000*/                   LDC R1, c[0x0][0x28] ;                        /* 0x00000a00ff017b82 */
                                                                                 /* 0x000fe20000000800 */
        /*0630*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0 ;      /* 0x000000f0000079c8 */
        /*0640*/              @!P0 BRA 0x100 ;                                   /* 0x000000f0000079c8 */
        /*0650*/                   HGMMA.64x176x16.F32.BF16 R24, gdesc[UR4], !UPT ; /* 0x0 */
        /*0660*/             @UP1  UTMALDG.4D [UR8], [UR4] ;                     /* 0x0 */
        /*50d0*/                   HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR4] ; /* 0x0 */
        /*150e0*/                  USETMAXREG.DEALLOC.CTAPOOL 0x18 ;             /* 0x00000018000079c8 */
"""


@pytest.fixture
def toolkit(tmp_path):
    """A toolkit whose nvcc copies its source to the object, writes a depfile, and fails where the source says so."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(FAKE_NVCC)
    nvcc.chmod(0o755)
    header = tmp_path / "header.cuh"
    header.write_text("")
    os.utime(header, (1, 1))
    return toolchain.Toolkit(tmp_path, nvcc, (13, 0))


CORE_FILES = len(generate.select("core")) + len(generate.ROWLESS)


@pytest.fixture
def build(toolkit, tmp_path, monkeypatch):
    """Builds rows and returns the lines that were shown."""
    monkeypatch.setattr(kernels.fetch_cutlass, "include_dir", lambda: tmp_path)

    def run(spec="core"):
        lines = []
        kernels.build(generate.select(spec), tmp_path / "out", toolkit, 2, lines.append)
        return lines

    return run


def compiled(lines):
    return sum(line.startswith("kernels [") for line in lines)


def test_every_file_is_compiled_once_and_reported(build, tmp_path):
    lines = build()
    assert f"{CORE_FILES} files, {CORE_FILES} to compile, 2 at a time, nvcc 13.0" in lines[0]
    assert any(
        line.startswith("kernels [0:0")
        and f" {CORE_FILES}/{CORE_FILES} " in line
        and "k 32 registers" in line
        for line in lines
    )
    assert {path.stem for path in (tmp_path / "out").glob("*.o")} == {
        *(row.name for row in generate.select("core")),
        *(Path(source).stem for source in generate.ROWLESS),
    }
    assert compiled(build()) == 0


def test_changed_header_compiles_every_file_again(build, tmp_path):
    build()
    (tmp_path / "header.cuh").write_text("changed")
    assert compiled(build()) == CORE_FILES


def test_changed_command_compiles_again(build, monkeypatch):
    build()
    monkeypatch.setattr(kernels.flags, "KERNEL", [*kernels.flags.KERNEL, "-DMORE"])
    assert compiled(build()) == CORE_FILES


def test_changed_row_compiles_alone(build, tmp_path):
    build()
    row = generate.select("core")[0]
    (tmp_path / "out" / "generated" / f"{row.name}.cu").write_text("edited by hand")
    assert compiled(build()) == 1


def test_interrupted_compile_is_repeated(build, tmp_path):
    build()
    next((tmp_path / "out").glob("*.cmd")).unlink()
    assert compiled(build()) == 1


def test_going_to_other_rows_and_back_compiles_nothing(build):
    build("core")
    build("fwd,hd64")
    assert compiled(build("core")) == 0


def test_failed_row_names_its_log_and_leaves_no_object(build, tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "row_source", lambda row: "not C++")
    with pytest.raises(
        kernels.BuildError, match=r"did not compile, see .*\.log\n.*error: not C\+\+"
    ):
        build()
    assert not list((tmp_path / "out").glob("*.o"))


def test_depfile_with_continued_lines_and_escaped_spaces(tmp_path):
    depfile = tmp_path / "x.d"
    depfile.write_text("/out/x.o : /src/x.cu \\\n    /include/a.h \\\n    /with\\ space/b.h\n")
    assert kernels.dependencies(depfile) == ["/src/x.cu", "/include/a.h", "/with space/b.h"]


def test_stamp_is_the_command_itself(tmp_path):
    output = tmp_path / "x.o"
    command = [
        "sh",
        "-c",
        f"echo ': ' > {shlex.quote(str(tmp_path / 'x.d'))}; : > {shlex.quote(str(output))}",
    ]
    assert kernels.compile_one(command, output)[1] is False
    assert kernels.is_current(output, command)
    assert not kernels.is_current(output, [*command, "other"])


def test_ptxas_report_holds_registers_spills_and_messages(tmp_path):
    (tmp_path / "x.log").write_text(PTXAS_LOG)
    report = ptxas.read(tmp_path / "x.log")
    post, main = report.kernels
    assert (post.name, post.registers, post.spill_stores) == ("bwd_postprocess_kernel", 48, 0)
    assert (main.name, main.registers) == ("bwd_kernel", 168)
    assert (main.stack, main.spill_stores, main.spill_loads) == (16, 8, 12)
    assert [message[:5] for message in report.messages] == ["C7510"]
    assert ptxas.summary(report).endswith("bwd_kernel SPILLS 8+12 bytes, C7510")
    post_line, main_line = ptxas.table([("x", report)]).splitlines()[1:3]
    assert post_line.split() == ["x", "bwd_postprocess_kernel", "48", "0", "0/0", "-"]
    assert main_line.split() == ["x", "bwd_kernel", "168", "16", "8/12", "C7510"]


def test_listing_is_read_to_opcodes_widths_and_register_requests():
    (function,) = sass.parse(LISTING)
    assert function.name == "fwd_kernel"
    assert sum(function.opcodes.values()) == 7
    assert function.gemm_widths() == {176, 128}
    assert function.register_requests == [240, 24]
    assert (function.count("UTMALDG"), function.count("HGMMA"), function.count("STL")) == (1, 2, 0)


def test_exponentials_are_counted_between_the_two_waits_of_a_step():
    step = "wait0 EX2 wait1 EX2 EX2 wait0 EX2 wait1 wait0"
    codes = {f"wait{n}": f"WARPGROUP.DEPBAR.LE gsb0, 0x{n}" for n in (0, 1)}
    codes["EX2"] = "MUFU.EX2 R1, R2"
    lines = ["Function : fwd_kernel"]
    for i, code in enumerate(codes[word] for word in step.split()):
        lines.append(f"        /*{i * 16:04x}*/                   {code} ;")
    (function,) = sass.parse("\n".join(lines))
    assert function.exponentials_between_waits() == [2, 0]
