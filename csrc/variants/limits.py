"""What a row may cost: shared memory, registers, shapes. A row that cannot work is refused before nvcc sees it.

The model counts what dominates (operand tiles and accumulators) and adds a stated allowance for the rest. The compiler
has the last word on registers: ``tests/sass`` reads its report.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from .table import DTYPES, LAYOUTS, MASKS, Bwd, Fwd, is_fp8

SMEM_LIMIT = (
    227 * 1024
)  # bytes one CTA may use on sm_90 (CUDA programming guide, compute capabilities)
BARRIER_BYTES = 1024  # mbarriers, the scheduler's slot and the alignment of the first tile
ELEMENT_BYTES = 2  # fp16 and bf16
WARPGROUP_ROWS = 64  # M of every wgmma instruction
WARPGROUP_THREADS = 128
MAX_WGMMA_N = 256
MAX_TMA_BOX = 256  # elements along one dimension of a TMA box
KERNEL_BUDGET = 240  # kernels in the whole table
DS_STAGES = 2  # slots for dS, kDsSlots of backward/traits.cuh

# Registers of a consumer thread after setmaxnreg, by consumer warpgroups: kRegisters of the traits.cuh.
CONSUMER_REGISTERS = {Fwd: {1: 232, 2: 232, 3: 160}, Bwd: {1: 240, 2: 240, 3: 160}}
FP8_CONSUMER_REGISTERS = {2: 224, 3: 152}  # their producer warpgroups also transpose V
FP8_WIDE_CONSUMER_REGISTERS = 232  # head_dim above 128, two warpgroups
# Row statistics, addresses, barrier phases: what a mainloop keeps beside its accumulators.
OTHER_REGISTERS = 24


def consumer_registers(row: Fwd | Bwd) -> int | None:
    """Registers that a consumer thread of the row has; None for a count of warpgroups that no kernel has."""
    if not is_fp8(row):
        return CONSUMER_REGISTERS[type(row)].get(row.mma_warpgroups)
    if row.mma_warpgroups == 2 and row.key.head_dim > 128:
        return FP8_WIDE_CONSUMER_REGISTERS
    return FP8_CONSUMER_REGISTERS.get(row.mma_warpgroups)


class LimitError(ValueError):
    """A row asks for more than the machine has; the message names the row and every limit it breaks."""


def keys_shared(row: Bwd) -> bool:
    """Whether both warpgroups work on the same 64 keys, kKeysShared of backward/traits.cuh."""
    return row.n == WARPGROUP_ROWS


def sums_twice(row: Fwd | Bwd) -> bool:
    """Whether P V has accumulators of its own beside O."""
    return isinstance(row, Fwd) and row.two_level


def smem_bytes(row: Fwd | Bwd) -> int:
    """Shared memory of one CTA, in bytes."""
    head_dim, head_dim_v = row.key.head_dim, row.key.head_dim_v
    if is_fp8(row):  # Q, K, V as it comes and V transposed; O goes straight to global memory
        rows_held = row.q_stages * row.m + 3 * row.kv_stages * row.n
        return rows_held * head_dim + BARRIER_BYTES
    if isinstance(row, Fwd):  # O is staged in the slot of the Q tile it belongs to
        queries = row.q_stages * row.m * head_dim
        keys_and_values = row.kv_stages * row.n * (head_dim + head_dim_v)
        return (queries + keys_and_values) * ELEMENT_BYTES + BARRIER_BYTES
    keys_and_values = row.n * (head_dim + head_dim_v) * ELEMENT_BYTES
    queries = row.m * (row.q_stages * head_dim + row.do_stages * head_dim_v) * ELEMENT_BYTES
    # dS, and P where the warpgroups share their keys
    d_scores = DS_STAGES * row.m * row.n * ELEMENT_BYTES * (2 if keys_shared(row) else 1)
    row_statistics = (
        (row.q_stages + row.do_stages) * row.m * 4
    )  # lse beside Q, dPsum beside dO, fp32
    return keys_and_values + queries + d_scores + row_statistics + BARRIER_BYTES


def registers(row: Fwd | Bwd) -> int:
    """Registers that one consumer thread needs at the fullest point of the mainloop."""
    head_dim, head_dim_v = row.key.head_dim, row.key.head_dim_v
    if isinstance(row, Fwd):
        rows_per_thread = row.m / row.mma_warpgroups / WARPGROUP_THREADS
        scores = rows_per_thread * row.n  # fp32
        # two (e4m3: four) to a register; live beside the next step's scores
        probabilities = scores / (4 if is_fp8(row) else 2)
        output = rows_per_thread * head_dim_v * (2 if row.two_level else 1)
        if not row.overlap:  # P is used up before the next scores come
            return int(max(scores, probabilities) + output) + OTHER_REGISTERS
        return int(scores + probabilities + output) + OTHER_REGISTERS
    threads = row.mma_warpgroups * WARPGROUP_THREADS
    d_key_value = row.n * (head_dim + head_dim_v) / threads
    scores = row.n * row.m / threads
    d_query = row.m * head_dim / threads
    packed = scores / 2  # two to a register
    # S and dP of a step stand side by side; before that, the next S beside dQ and, where it is no shared operand, P.
    fullest = max(2 * scores, scores + (0 if keys_shared(row) else packed) + d_query)
    return int(d_key_value + fullest) + OTHER_REGISTERS


def gemm_widths(row: Fwd | Bwd) -> set[int]:
    """N of every wgmma that the row issues: nothing narrower than its tile allows."""
    head_dim, head_dim_v = row.key.head_dim, row.key.head_dim_v
    if isinstance(row, Fwd):
        # kHalfSteps of forward/traits.cuh
        half_steps = (
            row.key.mask == "causal" and row.m > row.n and row.n % 32 == 0 and not is_fp8(row)
        )
        return {row.n, head_dim_v} | ({row.n // 2} if half_steps else set())  # S = Q K^T, O = P V
    # dQ (m x head_dim) is split over the warpgroups by rows where m allows it, else by columns.
    d_query = head_dim * (row.m // WARPGROUP_ROWS) // row.mma_warpgroups
    divided = row.mma_warpgroups if keys_shared(row) else 1
    # S^T and dP^T, dK, dV, dQ
    return {row.m // divided, head_dim // divided, head_dim_v // divided, d_query}


def problems(row: Fwd | Bwd) -> list[str]:
    """Every limit that the row breaks, in words; empty if it can be built."""
    found = []

    def require(condition: bool, message: str) -> None:
        if not condition:
            found.append(message)

    require(row.key.dtype in DTYPES or is_fp8(row), f"dtype {row.key.dtype} is not one of {DTYPES}")
    require(row.key.mask in MASKS, f"mask {row.key.mask} is not one of {MASKS}")
    require(row.key.layout in LAYOUTS, f"layout {row.key.layout} is not one of {LAYOUTS}")
    require(
        re.fullmatch("[a-z0-9_]*", row.tag) is not None, f"tag {row.tag!r} is no part of a name"
    )
    for head_dim in (row.key.head_dim, row.key.head_dim_v):
        require(
            head_dim % 32 == 0,
            f"head_dim {head_dim} is not a multiple of 32 (half of it is whole boxes of 16 columns)",
        )
    require(
        row.key.head_dim_v <= row.key.head_dim,
        f"head_dim {row.key.head_dim_v} of v is above that of q, {row.key.head_dim}, over which O is staged",
    )
    require(
        row.mma_warpgroups in CONSUMER_REGISTERS[type(row)],
        f"mma_warpgroups {row.mma_warpgroups} is not 1, 2 or 3",
    )
    require(
        row.n % 16 == 0 and 0 < row.n <= MAX_WGMMA_N,
        f"n {row.n} is not a multiple of 16 up to {MAX_WGMMA_N}",
    )
    if isinstance(row, Fwd):
        expected = WARPGROUP_ROWS * row.mma_warpgroups
        require(row.m == expected, f"m {row.m} is not 64 * mma_warpgroups = {expected}")
        stages = (row.q_stages, row.kv_stages)
        require(
            not row.guesses or row.key.mask != "local",
            "guesses, which local rows cannot",
        )
    else:
        expected = WARPGROUP_ROWS * row.mma_warpgroups
        require(
            row.n in (WARPGROUP_ROWS, expected),
            f"n {row.n} is not 64, or 64 * mma_warpgroups = {expected}",
        )
        require(
            row.m in (WARPGROUP_ROWS, 2 * WARPGROUP_ROWS),
            f"m {row.m} is not {WARPGROUP_ROWS} or {2 * WARPGROUP_ROWS}, between which dQ can be split",
        )
        require(
            row.mma_warpgroups == 2,
            f"mma_warpgroups {row.mma_warpgroups} is not 2, for which the registers are shared out",
        )
        stages = (row.q_stages, row.do_stages)
        require(
            all(count & (count - 1) == 0 for count in stages),
            f"stages {stages} are not powers of two, which the kernel's one step counter needs",
        )
    require(min(stages) >= 1, f"stages {stages} are not all at least 1")
    require(
        smem_bytes(row) <= SMEM_LIMIT,
        f"needs {smem_bytes(row)} bytes of shared memory of {SMEM_LIMIT}",
    )
    budget = consumer_registers(row)
    if budget:
        require(
            registers(row) <= budget, f"needs about {registers(row)} registers a thread of {budget}"
        )
    return found


def check(rows: Iterable[Fwd | Bwd], one_row_per_key: bool = True) -> None:
    """Raise LimitError unless every row can be built, the table is within its budget and no key has two equal rows.

    Dispatch knows a row by its key and, in the forward, by its tile, which the numbers of queries and keys choose. With
    ``one_row_per_key=False`` only the names must differ: rows of an experiment, which are launched by name.
    """
    rows = list(rows)
    faults = [f"{row.name}: {'; '.join(found)}" for row in rows if (found := problems(row))]
    keys = [
        f"{type(row).__name__.lower()}_{row.key.suffix}{'_two_level' * sums_twice(row)}"
        + (f" {row.m} x {row.n}" if isinstance(row, Fwd) else "")
        if one_row_per_key
        else row.name
        for row in rows
    ]
    shared = "key" if one_row_per_key else "name"
    faults += [
        f"{key}: {count} rows have this {shared}"
        for key, count in Counter(keys).items()
        if count > 1
    ]
    if len(rows) > KERNEL_BUDGET:
        faults.append(f"the table holds {len(rows)} kernels, its budget is {KERNEL_BUDGET}")
    if faults:
        raise LimitError("csrc/variants/table.py:\n  " + "\n  ".join(faults))
