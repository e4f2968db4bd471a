"""What ptxas said about a row: registers, stack, spills, and messages that cost speed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ENTRY = re.compile(r"Compiling entry function '(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
MESSAGE = re.compile(r"\((C75\d\d)\)(.*)")  # for example C7510: wgmma instructions were serialised


@dataclass
class Kernel:
    """One entry function of an object. Sizes are bytes per thread."""

    symbol: str
    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0

    @property
    def name(self) -> str:
        return plain_name(self.symbol)


@dataclass
class Report:
    """The kernels of one object and the C75xx messages of its compile."""

    kernels: list[Kernel] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


def read(log: Path) -> Report:
    """Parse the log of one compile made with ``-Xptxas=-v``."""
    report = Report()
    for line in log.read_text(errors="replace").splitlines() if log.is_file() else []:
        if match := ENTRY.search(line):
            report.kernels.append(Kernel(match[1]))
        elif match := MESSAGE.search(line):
            report.messages.append(f"{match[1]}{match[2]}")
        elif report.kernels and (match := STACK.search(line)):
            kernel = report.kernels[-1]
            kernel.stack, kernel.spill_stores, kernel.spill_loads = (
                int(size) for size in match.groups()
            )
        elif report.kernels and (match := USED.search(line)):
            report.kernels[-1].registers = int(match[1])
    return report


def plain_name(symbol: str) -> str:
    """ "fwd_kernel" from "_ZN6flash310fwd_kernelINS_...": the last part of the (Itanium) nested name."""
    rest, name = symbol.removeprefix("_ZN").removeprefix("_Z"), symbol
    while match := re.match(r"(\d+)", rest):
        end = match.end() + int(match[1])
        name, rest = rest[match.end() : end], rest[end:]
    return name


def summary(report: Report) -> str:
    """One line: each kernel's registers, then what is wrong, if anything."""
    parts = [f"{kernel.name} {kernel.registers} registers" for kernel in report.kernels]
    parts += [
        f"{k.name} SPILLS {k.spill_stores}+{k.spill_loads} bytes"
        for k in report.kernels
        if k.spill_stores
    ]
    return ", ".join(parts + sorted({message.split(" ")[0] for message in report.messages}))


def table(rows: Sequence[tuple[str, Report]]) -> str:
    """The final report, a line for each kernel of each row."""
    lines = [
        f"{'row':<26} {'kernel':<24} {'registers':>9} {'stack':>6} {'spill st/ld':>12}  messages"
    ]
    for row, report in rows:
        for kernel in report.kernels:
            codes = {
                message.split(" ")[0] for message in report.messages if kernel.symbol in message
            }
            spills = f"{kernel.spill_stores}/{kernel.spill_loads}"
            lines.append(
                f"{row:<26} {kernel.name:<24} {kernel.registers:>9} {kernel.stack:>6} "
                f"{spills:>12}  {' '.join(sorted(codes)) or '-'}"
            )
    for row, report in rows:
        lines += [f"{row}: {message}" for message in dict.fromkeys(report.messages)]
    return "\n".join(lines)
