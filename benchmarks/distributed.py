"""Attention over several GPUs: ring, all-gather and Ulysses beside torch's context_parallel and one GPU alone.

    torchrun --nproc-per-node 2 -m benchmarks.distributed --tokens 65536,131072 --out results

One process per GPU (NCCL; gloo on CPUs). Times are the slowest rank's. `share` is TFLOP/s per GPU over those of flash3
on one GPU with the same sequence, or with the longest that --alone allows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash3
from flash3 import distributed

from . import timeline
from .machine import describe_machine, gpu_state
from .report import markdown_table, update_file
from .shapes import DTYPES, Cell
from .timing import Contender, elapsed_ms

OURS = {
    "ring": distributed.ring_attn_func,
    "allgather": distributed.allgather_attn_func,
    "ulysses": distributed.ulysses_attn_func,
}
TORCH = {"torch-cudnn": SDPBackend.CUDNN_ATTENTION, "torch-flash": SDPBackend.FLASH_ATTENTION}
TORCH_FLASH3 = "torch-flash3"  # torch's context_parallel with flash3 as torch's flash attention
ALONE = "alone"  # one GPU


def tensors(cell: Cell, length: int, device: torch.device, gradients: bool) -> list[torch.Tensor]:
    """q, k, v and dout of `length` tokens, N(0, 1)."""
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    shapes = [(1, length, heads, cell.head_dim) for heads in (cell.heads, cell.heads_kv)]
    made = [
        torch.randn(shape, device=device, generator=generator, dtype=DTYPES[cell.dtype])
        for shape in (shapes[0], shapes[1], shapes[1], shapes[0])
    ]
    return [x.requires_grad_(gradients and i < 3) for i, x in enumerate(made)]


def calling(forward: Callable, inputs: list[torch.Tensor], backward: bool) -> Callable:
    q, k, v, dout = inputs

    def call():
        with torch.set_grad_enabled(backward):
            out = forward(q, k, v)
        if backward:
            torch.autograd.grad(out, (q, k, v), dout)

    return call


def torch_forward(causal: bool) -> Callable:
    """torch's SDPA in its own layout, (batch, heads, seqlen, head_dim) of the same memory."""

    def forward(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return forward


def torch_context(mesh: DeviceMesh, backend: SDPBackend) -> Callable:
    """SDPA as torch's context_parallel patches it. Shards are made by the caller; a dummy buffer is what it divides."""
    from torch.distributed.tensor.experimental import context_parallel

    @contextmanager
    def context():
        dummy = torch.zeros(2 * mesh.size(), device=mesh.device_type)
        with (
            context_parallel(
                mesh, buffers=[dummy], buffer_seq_dims=[0], no_restore_buffers={dummy}
            ),
            sdpa_kernel(backend),
        ):
            yield

    return context


def flash3_in(context: Callable) -> Callable:
    """The context with flash3 as torch's flash attention, torch's own outside of it."""
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    from flash3 import sdpa

    sdpa.register()

    @contextmanager
    def activated():
        activate_flash_attention_impl(sdpa.NAME)
        try:
            with context():
                yield
        finally:
            restore_flash_attention_impl()

    return activated


def contenders(cell: Cell, mesh: DeviceMesh, names: list[str], alone_tokens: int) -> dict:
    """{name: (contender, tokens of the whole sequence, GPUs that share it)}."""
    size, backward = mesh.size(), cell.mode == "both"
    device = torch.device(mesh.device_type)
    shard = tensors(cell, cell.seqlen // size, device, backward)
    made = {}
    for name in names:
        if name in OURS:
            forward = _bound(OURS[name], mesh, cell.causal)
            made[name] = Contender(name, calling(forward, shard, backward)), cell.seqlen, size
        elif name in TORCH:
            context = torch_context(mesh, TORCH[name])
            call = calling(torch_forward(cell.causal), shard, backward)
            made[name] = Contender(name, call, context), cell.seqlen, size
        else:
            context = flash3_in(torch_context(mesh, SDPBackend.FLASH_ATTENTION))
            call = calling(torch_forward(cell.causal), shard, backward)
            made[name] = Contender(name, call, context), cell.seqlen, size
    length = min(cell.seqlen, alone_tokens)
    whole = tensors(cell, length, device, backward)
    forward = lambda q, k, v: flash3.flash_attn_func(q, k, v, causal=cell.causal)  # noqa: E731
    made[ALONE] = Contender(ALONE, calling(forward, whole, backward)), length, 1
    return made


def _bound(function: Callable, mesh: DeviceMesh, causal: bool) -> Callable:
    return lambda q, k, v: function(q, k, v, mesh, causal=causal)


def flops(cell: Cell, tokens: int) -> float:
    forward = 4 * cell.heads * tokens * tokens * cell.head_dim * (0.5 if cell.causal else 1.0)
    return forward * (3.5 if cell.mode == "both" else 1.0)


def slowest(milliseconds: float, device: torch.device) -> float:
    """The largest of the ranks' times."""
    time = torch.tensor(milliseconds, device=device, dtype=torch.float64)
    dist.all_reduce(time, dist.ReduceOp.MAX)
    return time.item()


def sample(contender: Contender, device: torch.device) -> float:
    with contender.context():
        dist.barrier()
        return slowest(elapsed_ms(contender.call, 1, device), device)


def measure(cell: Cell, mesh: DeviceMesh, args) -> dict:
    """One row of the result: every contender's times, by turns."""
    made = contenders(cell, mesh, args.only, args.alone)
    device = torch.device(mesh.device_type)
    times: dict[str, list[float]] = {name: [] for name in made}
    errors = {}
    for turn in range(args.rounds + 1):  # the first turn warms up
        for name, (contender, _, _) in made.items():
            if name in errors:
                continue
            try:
                milliseconds = sample(contender, device)
            except (RuntimeError, NotImplementedError, ValueError) as error:
                errors[name] = f"{type(error).__name__}: {error}"[:300]
                continue
            if turn:
                times[name].append(milliseconds)
    results: dict[str, dict] = {name: {"error": error} for name, error in errors.items()}
    for name, (_, tokens, gpus) in made.items():
        if name not in errors:
            median = statistics.median(times[name])
            results[name] = {
                "ms": median,
                "ms_all": times[name],
                "tflops_per_gpu": flops(cell, tokens) / gpus / median * 1e-9,
                "tokens_per_second": tokens / median * 1e3,
            }
    for found in results.values():
        if "error" not in found and "error" not in results[ALONE]:
            found["share"] = found["tflops_per_gpu"] / results[ALONE]["tflops_per_gpu"]
    return {"cell": cell.as_dict(), "alone_tokens": made[ALONE][1], "results": results}


NAMES = {
    "ring": "ring_attn_func",
    "allgather": "allgather_attn_func",
    "ulysses": "ulysses_attn_func",
    "torch-cudnn": "context_parallel of torch, cuDNN",
    "torch-flash": "context_parallel of torch, its flash",
    TORCH_FLASH3: "context_parallel of torch, flash3",
}


def describe_cell(cell: dict) -> str:
    what = "forward and backward" if cell["mode"] == "both" else "forward"
    mask = "causal" if cell["causal"] else "full"
    return (
        f"{cell['seqlen'] >> 10}k tokens, {cell['heads']}/{cell['heads_kv']} heads, {mask}, {what}"
    )


def table(result: dict) -> str:
    """One line for each shape and way; one GPU alone is the measure of `share`."""
    lines = []
    for row in result["rows"]:
        for name, found in row["results"].items():
            tokens = f", {row['alone_tokens'] >> 10}k tokens" if name == ALONE else ""
            line = [describe_cell(row["cell"]), NAMES.get(name, f"one GPU{tokens}")]
            if "error" in found:
                lines.append([*line, found["error"].split("\n")[0][:60], "", "", ""])
                continue
            line += [f"{found['ms']:,.2f}", f"{found['tflops_per_gpu']:.0f}"]
            share = f"{found['share']:.2f}" if "share" in found else "-"
            lines.append([*line, share, f"{found['tokens_per_second']:,.0f}"])
    header = [f"{result['gpus']} GPUs: shape", "by", "ms", "TFLOP/s per GPU", "share", "tokens/s"]
    return markdown_table(header, lines)


def report(files: list[Path], target: Path | None) -> str:
    """The tables of stored results and what their timelines say, into a document if there is one."""
    results = [json.loads(file.read_text()) for file in files]
    parts = [table(result) for result in results]
    for result in results:
        last = result["rows"][-1]["cell"]
        shape = f"{last['seqlen'] >> 10}k tokens, {last['heads']}/{last['heads_kv']} heads"
        lines = [f"- {name}: {timeline.describe(x)}" for name, x in result["timelines"].items()]
        if lines:
            parts.append("\n".join([f"One call, {shape}, rank 0:", "", *lines]))
    if target is not None:
        update_file(target, {"distributed": "\n\n".join(parts)})
    return "\n\n".join(parts)


def integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tokens", type=integers, default=[65536, 131072], help="of the whole sequence")
    add("--heads", type=int, default=32)
    add("--heads-kv", type=int, default=8)
    add("--head-dim", type=int, default=128)
    add("--dtype", choices=DTYPES, default="bf16")
    add("--mask", choices=("full", "causal"), default="causal")
    add("--modes", type=lambda text: text.split(","), default=["fwd", "both"], help="fwd,both")
    everybody = [*OURS, *TORCH, TORCH_FLASH3]
    add("--only", type=lambda text: text.split(","), default=everybody, help="who runs")
    add("--alone", type=int, default=131072, help="longest sequence of the one-GPU run, in tokens")
    add("--rounds", type=int, default=5, help="samples per contender")
    add("--timeline", action="store_true", help="profile each of ours, last tokens, every mode")
    add("--out", type=Path, help="folder for JSON, the table and the timelines")
    add("--name", default="distributed")
    add("--report", type=Path, nargs="+", metavar="FILE.json", help="render results, run nothing")
    add("--write", type=Path, help="with --report: file whose <!-- bench:distributed --> to fill")
    args = parser.parse_args(argv)
    if unknown := set(args.only) - set(everybody):
        parser.error(f"--only: unknown {', '.join(unknown)}; there are {', '.join(everybody)}")
    return args


def cells_of(args) -> list[Cell]:
    return [
        Cell(mode, args.dtype, args.head_dim, args.mask == "causal", tokens, 1, args.heads, args.heads_kv)
        for tokens in args.tokens
        for mode in args.modes
    ]  # fmt: skip


def timelines(mesh: DeviceMesh, device: torch.device, args) -> dict:
    """What the GPU did during a call of each of ours, at the last number of tokens."""
    found = {}
    names = [name for name in args.only if name in OURS]
    for cell in cells_of(args)[-len(args.modes) :]:
        made = contenders(cell, mesh, names, alone_tokens=1024)
        for name in names:
            stem = f"{args.name}-{name}-{cell.mode}"
            path = args.out / f"{stem}.png" if args.out and dist.get_rank() == 0 else None
            dist.barrier()
            found[f"{name}-{cell.mode}"] = timeline.profile(made[name][0].call, device, path)
    return found


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.report:
        print(report(args.report, args.write))
        return 0
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    first = dist.get_rank() == 0
    result = {"machine": describe_machine(device), "gpu_state": gpu_state(device)}
    result |= {"gpus": mesh.size(), "rows": [], "timelines": {}}
    for cell in cells_of(args):
        row = measure(cell, mesh, args)
        result["rows"].append(row)
        if first:
            print(table({**result, "rows": [row]}), flush=True)
    if args.timeline:
        result["timelines"] = timelines(mesh, device, args)
    if first:
        print("\n" + table(result))
        for name, found in result["timelines"].items():
            print(f"{name}: {timeline.describe(found)}")
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / f"{args.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
