"""What the compiler must have made of every row: a change that breaks one of these makes the kernel slow, not wrong."""

import re
import subprocess

import pytest
from variants import limits
from variants.table import Bwd

REGISTER_FILE = 64 * 1024  # registers of one SM


def test_gemms_are_as_wide_as_the_tile(main_kernel, row):
    assert main_kernel.gemm_widths() == limits.gemm_widths(row)


def test_gemms_accumulate_in_fp32_from_the_rows_dtype(main_kernel, row):
    gemms = {opcode for opcode in main_kernel.opcodes if "GMMA." in opcode}
    opcode_of = {
        "f16": r"HGMMA\.64x\d+x16\.F32",
        "bf16": r"HGMMA\.64x\d+x16\.F32\.BF16",
        "e4m3": r"QGMMA\.64x\d+x32\.F32\.E4M3\.E4M3",
    }
    assert gemms
    assert all(re.fullmatch(opcode_of[row.key.dtype], opcode) for opcode in gemms), gemms


def test_operands_are_loaded_by_tma(main_kernel):
    assert main_kernel.count("UTMALDG") > 0
    assert main_kernel.count("LDGSTS") == 0, "cp.async in a kernel whose operands come by TMA"


def test_registers_move_from_the_producer_to_the_consumers(main_kernel, row):
    requests = sorted(main_kernel.register_requests)
    assert len(requests) == 2, requests
    producer, consumer = requests
    assert consumer == limits.consumer_registers(row)
    assert (producer + row.mma_warpgroups * consumer) * limits.WARPGROUP_THREADS <= REGISTER_FILE


def test_registers_at_launch_fit_the_register_file(report, row, kernel_name):
    threads = (row.mma_warpgroups + 1) * limits.WARPGROUP_THREADS
    main = next(k for k in report.kernels if k.name == kernel_name)
    assert 0 < main.registers * threads <= REGISTER_FILE


def test_no_kernel_spills(report):
    assert report.kernels
    spilling = {k.name: (k.stack, k.spill_stores, k.spill_loads) for k in report.kernels}
    assert all(sizes == (0, 0, 0) for sizes in spilling.values()), spilling


def test_no_local_memory_in_the_main_kernel(main_kernel):
    assert main_kernel.count("STL") == 0
    assert main_kernel.count("LDL") == 0


def test_ptxas_has_no_performance_complaint(report):
    """C7510 and its relatives: wgmma instructions were serialised."""
    assert report.messages == []


def test_softmax_starts_under_the_second_gemm(main_kernel, row):
    """A forward step waits for P V after its first exponentials; ptxas would move that wait in front of them (E015)."""
    if isinstance(row, Bwd) or not row.overlap:
        pytest.skip("a forward step with P V in flight is meant")
    between = main_kernel.exponentials_between_waits()
    assert len(between) >= 2, "the loops with and without a mask"
    # Capping takes an exponential for each score, before the softmax: 64 rows of n keys on 128 threads.
    capping = row.n // 2 if row.key.mask == "local" else 0
    assert min(between) > capping, between


def test_object_has_no_torch_or_python_symbol(objects, row):
    symbols = subprocess.run(
        ["nm", str(objects[row.name])], capture_output=True, text=True, check=True
    ).stdout
    foreign = [
        line
        for line in symbols.splitlines()
        if re.search(r"torch|aoti_|\b_?Py[A-Z_]|_ZN?K?(2at|3c10)|pybind", line)
    ]
    assert symbols
    assert foreign == []
