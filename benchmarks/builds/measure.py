"""Rows of several builds timed on the cells of the grid, interleaved with each other and with their peers."""

import statistics
from collections.abc import Callable, Collection, Sequence

import torch

from flash3.reference import attention_forward

from .. import gate
from ..baselines import Implementation
from ..problem import make_call, make_values
from ..runner import Settings, record_error, run_once
from ..shapes import DTYPES, Cell
from ..timing import Contender, Samples, interleave, quartiles, synchronize, warm_up
from .call import RowCall, prepare
from .library import Library, Row

# Blocks of the reference that gives the backward its lse: few steps, and scores of about 1 GB.
REFERENCE_TILES = {"tile_m": 1024, "tile_n": 4096}


Rows = dict[str, tuple[Library, Row]]  # by the name in reports


def rows_for(cell: Cell, libraries: Sequence[Library], wrong: Collection[str]) -> Rows:
    """The rows to time on a cell: of each build the smallest that hold the cell's head_dims, less the wrong."""
    found = {}
    for library in libraries:
        rows = [
            row
            for row in library.rows
            if (row.mode, row.dtype, row.causal) == (cell.mode, cell.dtype, cell.causal)
            and row.head_dim >= cell.head_dim
            and row.head_dim_v >= cell.values_dim
        ]
        sizes = {row.name: (row.head_dim, row.head_dim_v) for row in rows}
        least = min(sizes.values(), default=None)
        found |= {library.name(row): (library, row) for row in rows if sizes[row.name] == least}
    return {name: value for name, value in found.items() if name not in wrong}


def names_of(peers: Sequence[Implementation]) -> list[str]:
    return [peer.name for peer in peers]


def with_forward(cell: Cell, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``values`` and, for the backward, out (rounded) and lse, the same for every build."""
    if cell.mode == "fwd":
        return values
    q, k, v = (values[name] for name in "qkv")
    out, lse = attention_forward(q, k, v, cell.head_dim**-0.5, cell.causal, **REFERENCE_TILES)
    return {**values, "out": out.to(DTYPES[cell.dtype]), "lse": lse}


def run_gated(cell: Cell, call: RowCall, baseline_name: str, reference: tuple | None) -> None:
    """Runs the call once. Raises gate.WrongResult if it differs from what the baseline computed, where that ran: a
    large shape may show what the small ones of check.py do not."""
    call.poison()
    call()
    synchronize(call.workspace.device)
    if reference is not None:
        ours = tuple(call.tensors[name] for name in gate.RESULTS[cell.mode])
        gate.check(cell.mode, ours, reference, baseline_name)


def over_first(samples: dict[str, Samples], names: Sequence[str]) -> dict[str, dict]:
    """How much faster each of ``names`` is than the first: quartiles of the ratios round by round, which share the
    clock and the temperature of their round."""
    first = samples[names[0]].milliseconds
    ratios = {
        name: quartiles([a / b for a, b in zip(first, samples[name].milliseconds, strict=True)])
        for name in names
    }
    return {
        name: dict(zip(("q1", "median", "q3"), found, strict=True))
        for name, found in ratios.items()
    }


def measure_cell(
    cell: Cell,
    rows: Rows,
    peers: Sequence[Implementation],
    settings: Settings,
    device: torch.device,
    progress: Callable[[str], None],
) -> dict:
    """The cell's entry of the result file. A row or a peer that raises has {"error": ...}.

    The rows' results are compared with those of the first peer. ``progress`` hears what runs next. Raises DeviceLost
    when the device cannot go on.
    """
    results: dict[str, dict] = {}
    values = make_values(cell, device, settings.seed)
    contenders, reference = [], None
    for peer in peers:
        try:
            progress(f"{cell} {peer.name}")
            call = make_call(cell, peer, values)
            found = run_once(call, peer)
            synchronize(device)
            reference = found if peer is peers[0] else reference
            contenders.append(Contender(peer.name, call, peer.context))
        except Exception as error:
            record_error(error, results, peer.name, device)
    inputs = with_forward(cell, values)
    for name, (library, row) in rows.items():
        progress(f"{cell} {name}")
        try:
            call = prepare(library, row, inputs)
            run_gated(cell, call, peers[0].name, reference)
            contenders.append(Contender(name, call))
        except Exception as error:
            record_error(error, results, name, device)
    del reference
    results |= time_contenders(cell, contenders, settings, device)
    return {**cell.as_dict(), "results": {n: results[n] for n in (*names_of(peers), *rows)}}


def time_contenders(
    cell: Cell, contenders: list[Contender], settings: Settings, device: torch.device
) -> dict[str, dict]:
    calls = {
        contender.name: warm_up(contender, device, settings.warmup_s, settings.sample_ms)
        for contender in contenders
    }
    samples = interleave(contenders, calls, settings.rounds, device)
    ours = [contender.name for contender in contenders if isinstance(contender.call, RowCall)]
    ratios = over_first(samples, ours) if ours else {}
    timed = {}
    for name, found in samples.items():
        timed[name] = found.as_dict()
        timed[name]["tflops"] = cell.tflops(statistics.median(found.milliseconds))
        if name in ratios:
            timed[name]["over_first"] = ratios[name]
    return timed
