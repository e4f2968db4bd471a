"""Read the machine code of kernel objects: instruction counts by kernel, for tests and for a look by hand.

    python build_tools/sass.py build/kernels/fwd_bf16_hd128_causal.o           # opcodes that matter, by kernel
    python build_tools/sass.py build/kernels/fwd_bf16_hd128_causal.o --listing # the whole listing

cuobjdump comes from the CUDA toolkit, or from triton, which is installed with CUDA builds of torch.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from build_tools import toolchain
from build_tools.ptxas import plain_name

FUNCTION = re.compile(r"^\s*Function : (\S+)")
INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.x]*[^\s;]*)\s*([^;]*);"
)
EXPONENTIAL = "MUFU.EX2"
GEMM = re.compile(r"^[HQI]GMMA\.(\d+)x(\d+)x(\d+)")
WORTH_SHOWING = re.compile(r"GMMA|UTMA|UBLK|USETMAXREG|STL|LDL|WARPGROUP|SYNCS|RED|ATOM|MUFU|BAR")


@dataclass
class Function:
    """One kernel's code: how often each opcode (with its modifiers) occurs, operands of setmaxnreg, a few in order."""

    symbol: str
    opcodes: Counter = field(default_factory=Counter)
    register_requests: list[int] = field(default_factory=list)
    order: list[str] = field(default_factory=list)  # exponentials and waits for wgmma, as they come

    @property
    def name(self) -> str:
        return plain_name(self.symbol)

    def gemm_widths(self) -> set[int]:
        """N of every tensor-core instruction."""
        return {int(match[2]) for opcode in self.opcodes if (match := GEMM.match(opcode))}

    def exponentials_between_waits(self) -> list[int]:
        """For each wait that leaves one wgmma group in flight: how many exponentials come before the wait for that."""
        counts, open_count = [], None
        for item in self.order:
            if item == EXPONENTIAL:
                open_count = open_count if open_count is None else open_count + 1
            elif item == "wait 1":
                open_count = 0
            elif open_count is not None:
                counts.append(open_count)
                open_count = None
        return counts

    def count(self, base: str) -> int:
        """How many instructions have ``base`` as the part of their opcode before the first dot."""
        return sum(n for opcode, n in self.opcodes.items() if opcode.split(".")[0] == base)


def find_cuobjdump() -> Path | None:
    return toolchain.find_binary("cuobjdump", toolchain.find_toolkit())


def listing(path: Path, cuobjdump: Path) -> str:
    """The disassembly of every kernel in an object or library."""
    result = subprocess.run([str(cuobjdump), "-sass", str(path)], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"cuobjdump failed on {path}: {result.stderr.strip()}")
    return result.stdout


def parse(text: str) -> list[Function]:
    """The functions of a listing."""
    functions: list[Function] = []
    for line in text.splitlines():
        if match := FUNCTION.match(line):
            functions.append(Function(match[1]))
        elif functions and (match := INSTRUCTION.match(line)):
            functions[-1].opcodes[match[1]] += 1
            if match[1] == EXPONENTIAL:
                functions[-1].order.append(EXPONENTIAL)
            elif match[1].startswith("WARPGROUP.DEPBAR"):
                functions[-1].order.append(f"wait {int(match[2].split()[-1], 0)}")
            if match[1].startswith("USETMAXREG"):
                functions[-1].register_requests.append(
                    int(re.findall(r"\b0x[0-9a-f]+|\b\d+", match[2])[-1], 0)
                )
    return functions


def read(path: Path) -> list[Function]:
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        raise RuntimeError(
            "cuobjdump was not found: not in the CUDA toolkit, on PATH or in an installed triton"
        )
    return parse(listing(path, cuobjdump))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("object", type=Path)
    parser.add_argument("--listing", action="store_true", help="print the disassembly")
    args = parser.parse_args()
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        print(
            "flash3: cuobjdump was not found in the CUDA toolkit, on PATH or in triton",
            file=sys.stderr,
        )
        return 1
    text = listing(args.object, cuobjdump)
    if args.listing:
        print(text)
        return 0
    for function in parse(text):
        print(
            f"{function.name}: {sum(function.opcodes.values())} instructions, setmaxnreg {function.register_requests}"
        )
        for opcode, count in sorted(function.opcodes.items()):
            if WORTH_SHOWING.search(opcode):
                print(f"  {count:6} {opcode}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
