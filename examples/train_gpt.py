"""Trains a small GPT in bf16 on the Python standard library's sources, byte by byte.

    python examples/train_gpt.py                    # flash3; a full run on a GPU, a tiny one on CPU
    python examples/train_gpt.py --compare sdpa     # the same seeds with torch's attention too
    python examples/train_gpt.py --pack             # no attention from one source file to another
    python examples/train_gpt.py --window 1024      # to the 1,024 tokens before alone
    python examples/train_gpt.py --attention flash3-fp8 --compare flash3    # float8 beside bf16

Sequences divided among processes, a GPU each (on CPU: gloo), and the same training in one process:

    torchrun --nproc-per-node 2 examples/train_gpt.py --context-parallel 2 --compare flash3

The weights are float32, autocast computes in bf16. Roundings differ between attention kernels, and
training amplifies them: `--attention math --compare sdpa` shows how far torch's own two paths part.

Prints loss, tokens/s and a generated sample; writes loss.png and loss.json to --out.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import context_parallel
import stdlib_text
import torch
import torch.nn.functional as F
from attention_time import attention_milliseconds
from context_parallel import ALONE, Ranks
from gpt import ATTENTIONS, GPT, GPTConfig
from torch import nn
from tqdm import tqdm

REPORT_EVERY = 10  # steps between updates of the progress bar: reading a loss waits for the GPU
WARM_STEPS = 5  # not counted in tokens/s
VALIDATION_BATCHES = 8


@dataclass(frozen=True)
class Settings:
    """One training run. Defaults are for an H200: 8 layers, 8k context, 90 million weights."""

    attention: str = "flash3"
    context: int = 8192
    layers: int = 8
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    batch: int = 4
    steps: int = 250
    learning_rate: float = 6e-4
    seed: int = 0
    device: str = "cuda"
    pack: bool = False  # a window's files are documents of their own
    window: int | None = None  # tokens back that attention reaches
    context_parallel: int = 1  # ranks that divide each sequence
    context_parallel_attention: str = "ring"  # and how, if there are several

    @property
    def label(self) -> str:
        if self.context_parallel == 1:
            packed = ", packed" if self.pack else ""
            return self.attention + packed + (f", window {self.window}" if self.window else "")
        how = self.context_parallel_attention
        return f"{self.attention} on {self.context_parallel} ranks ({how})"

    @property
    def model(self) -> GPTConfig:
        return GPTConfig(
            stdlib_text.VOCABULARY,
            self.context,
            self.layers,
            self.heads,
            self.kv_heads,
            self.head_dim,
        )


TINY = Settings(
    context=128, layers=2, heads=2, kv_heads=1, head_dim=64, batch=16, steps=300,
    learning_rate=2e-3, device="cpu",
)  # fmt: skip


@dataclass
class Run:
    settings: Settings
    losses: list[float] = field(default_factory=list)  # nats per byte, one per step
    validation_loss: float = math.nan
    tokens_per_second: float = math.nan
    step_ms: float = math.nan
    attention_ms: dict[str, float] = field(default_factory=dict)  # one layer: forward, backward
    sample: str = ""

    @property
    def attention_share(self) -> float:
        """Part of a step that all layers' attention takes, forward and backward."""
        return self.settings.layers * sum(self.attention_ms.values()) / self.step_ms

    def as_dict(self) -> dict:
        return {**asdict(self), "torch": torch.__version__}


def learning_rate(step: int, settings: Settings) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine down to a tenth of the peak."""
    warmup = max(1, settings.steps // 10)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, settings.steps - warmup)
    return settings.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def autocast(settings: Settings) -> torch.autocast:
    return torch.autocast(settings.device.split(":")[0], torch.bfloat16)


def loss_of(
    model: nn.Module,
    text: torch.Tensor,
    settings: Settings,
    generator: torch.Generator,
    ranks: Ranks,
) -> torch.Tensor:
    """The mean loss of the next windows; with several ranks of this rank's part of each."""
    windows = stdlib_text.windows(text, settings.batch, settings.context, generator)
    inputs, targets = (ranks.shard(x) for x in windows)
    documents = stdlib_text.documents(inputs) if settings.pack else None
    with autocast(settings):
        logits = model(inputs, ranks.positions(inputs), documents)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fit(
    model: nn.Module, text: stdlib_text.Text, run: Run, progress: tqdm, ranks: Ranks = ALONE
) -> None:
    """The training loop: fills the run's losses and speed."""
    settings, device = run.settings, torch.device(run.settings.device)
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    losses = []  # 0-dim tensors on the device: reading one would wait for it
    start, warm = time.perf_counter(), min(WARM_STEPS, settings.steps - 1)
    for step in progress:
        if step == warm:
            synchronize(device)
            start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        loss = loss_of(model, text.train, settings, generator, ranks)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step > warm and step % REPORT_EVERY == 0:
            shown = ranks.mean(losses[-1]).item()
            elapsed = time.perf_counter() - start
            speed = (step + 1 - warm) * settings.batch * settings.context / elapsed
            progress.set_postfix_str(f"loss {shown:.3f}, {speed:,.0f} tokens/s")
    synchronize(device)
    run.step_ms = (time.perf_counter() - start) * 1e3 / (settings.steps - warm)
    run.tokens_per_second = settings.batch * settings.context / run.step_ms * 1e3
    run.losses = ranks.mean(torch.stack(losses)).tolist()


@torch.no_grad()
def validation_loss(
    model: GPT, text: stdlib_text.Text, settings: Settings, ranks: Ranks = ALONE
) -> float:
    generator = torch.Generator().manual_seed(1)
    losses = [
        loss_of(model, text.validation, settings, generator, ranks)
        for _ in range(VALIDATION_BATCHES)
    ]
    return ranks.mean(torch.stack(losses)).mean().item()


def generate(model: GPT, settings: Settings, prompt: str = "def ", length: int = 200) -> str:
    generator = torch.Generator().manual_seed(settings.seed)
    tokens = torch.tensor([list(prompt.encode())], device=settings.device)
    with autocast(settings):
        tokens = model.generate(tokens, length, generator)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def train(
    settings: Settings, text: stdlib_text.Text, sample_length: int = 200, ranks: Ranks = ALONE
) -> Run:
    """Trains one model; everything random follows from settings.seed.

    With several ranks every rank calls it. All get the losses, the first one the sample.
    """
    torch.manual_seed(settings.seed)  # weights are drawn on the CPU: the same on every device
    device = torch.device(settings.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # matrices this small: more threads mostly wait for each other
    alone = partial(ATTENTIONS[settings.attention], window=settings.window)
    attention = ranks.attention(alone)
    model = GPT(settings.model, attention).to(device)
    run = Run(settings)
    with tqdm(
        range(settings.steps), f"training, {settings.label}", unit="step", dynamic_ncols=True,
        disable=not ranks.first,
    ) as progress:  # fmt: skip
        fit(ranks.averaging(model), text, run, progress, ranks)
    run.validation_loss = validation_loss(model, text, settings, ranks)
    length = settings.context // settings.context_parallel
    if settings.pack:
        generator = torch.Generator().manual_seed(1)
        inputs, _ = stdlib_text.windows(text.train, settings.batch, length, generator)
        attention = partial(attention, documents=stdlib_text.documents(inputs))
    run.attention_ms = attention_milliseconds(
        settings.model, attention, settings.batch, length, device
    )
    if sample_length and ranks.first:
        model.use_attention(alone)  # the others are not waited for
        run.sample = generate(model, settings, length=sample_length)
    return run


def loss_difference(a: Run, b: Run) -> tuple[float, float]:
    """Largest and mean absolute difference of the two loss curves, nats per byte."""
    differences = [abs(x - y) for x, y in zip(a.losses, b.losses, strict=True)]
    return max(differences), sum(differences) / len(differences)


def plot(runs: list[Run], path: Path) -> None:
    """Loss curves; with two runs their difference below, on its own scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = len(runs)
    figure, axes = plt.subplots(
        lines, 1, figsize=(8, 4.5 + 2 * (lines - 1)), sharex=True, squeeze=False,
        height_ratios=[3, 1][:lines],
    )  # fmt: skip
    styles = [{"color": "#d1495b", "linewidth": 2.2}, {"color": "#2e4057", "linestyle": "--"}]
    for run, style in zip(runs, styles, strict=False):
        label = f"{run.settings.label}, validation {run.validation_loss:.3f}"
        axes[0, 0].plot(run.losses, label=label, **style)
    s = runs[0].settings
    axes[0, 0].set_title(
        f"GPT on the standard library: {s.layers} layers, width {s.heads * s.head_dim}, "
        f"context {s.context}"
    )
    axes[0, 0].set_ylabel("training loss, nats per byte")
    axes[0, 0].legend(frameon=False)
    if lines == 2:
        names = "\n- ".join(run.settings.label for run in runs)
        difference = [a - b for a, b in zip(runs[0].losses, runs[1].losses, strict=True)]
        axes[1, 0].plot(difference, color="#2e4057", linewidth=1)
        axes[1, 0].set_ylabel(names)
    axes[-1, 0].set_xlabel("step")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def describe(run: Run) -> str:
    spent = run.attention_ms
    return (
        f"{run.settings.label}: loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f}, validation "
        f"{run.validation_loss:.3f} nats per byte; {run.tokens_per_second:,.0f} tokens/s, "
        f"{run.step_ms:.1f} ms per step; attention of one layer {spent['forward']:.3f} ms forward, "
        f"{spent['backward']:.3f} ms backward, {run.attention_share:.0%} of the step"
    )


def compare(ours: Run, theirs: Run) -> str:
    largest, mean = loss_difference(ours, theirs)
    spent = [sum(run.attention_ms.values()) for run in (ours, theirs)]
    name, other = ours.settings.label, theirs.settings.label
    return (
        f"{name} against {other}, same seed: loss curves differ by at most {largest:.4f} and by "
        f"{mean:.4f} on average; attention takes {spent[0] / spent[1]:.2f} times {other}'s time, "
        f"a step {ours.step_ms / theirs.step_ms:.2f} times"
    )


def report(runs: list[Run], out: Path) -> None:
    """Prints the runs, writes loss.json and loss.png."""
    out.mkdir(parents=True, exist_ok=True)
    for run in runs:
        print(describe(run))
    if len(runs) == 2:
        print(compare(*runs))
    if runs[0].sample:
        print(f"\nA sample of {runs[0].settings.attention}'s model:\n{'-' * 60}")
        print(runs[0].sample)
        print("-" * 60)
    (out / "loss.json").write_text(json.dumps([run.as_dict() for run in runs], indent=1) + "\n")
    plot(runs, out / "loss.png")
    print(f"Loss curve: {out / 'loss.png'}")


def default_settings(device: str) -> Settings:
    return replace(Settings() if device.startswith("cuda") else TINY, device=device)


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, Settings]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--attention", choices=ATTENTIONS, default="flash3")
    add("--compare", choices=ATTENTIONS, help="train again with this attention and compare")
    add("--context-parallel", type=int, metavar="N", help="processes that divide each sequence")
    add("--context-parallel-attention", choices=context_parallel.FUNCTIONS, help="default: ring")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, default=Path("build/train_gpt"))
    large, tiny = default_settings("cuda"), default_settings("cpu")
    for name in ("context", "layers", "heads", "kv_heads", "head_dim", "batch", "steps"):
        flag = "--" + name.replace("_", "-")
        add(flag, type=int, help=f"{getattr(large, name)} on a GPU, {getattr(tiny, name)} on CPU")
    add("--learning-rate", type=float)
    add("--pack", action="store_true", help="files are documents: no attention between them")
    add("--window", type=int, help="tokens back that attention reaches; all by default")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    chosen = {
        name: getattr(args, name) for name in asdict(large) if getattr(args, name) is not None
    }
    settings = replace(default_settings(args.device), **chosen)
    if settings.steps < 1 or settings.kv_heads < 1 or settings.heads % settings.kv_heads:
        parser.error("--steps must be positive and --heads a multiple of --kv-heads")
    if settings.window is not None and settings.window < 1:
        parser.error(f"--window must be positive, got {settings.window}")
    fault = context_parallel.fault(settings, args.context_parallel_attention)
    if fault:
        parser.error(fault)
    return args, settings


def main(argv: list[str] | None = None) -> int:
    args, settings = parse(argv)
    with context_parallel.joined(settings) as ranks:
        text = stdlib_text.load(torch.device(settings.device))
        if ranks.first:
            print(
                f"{len(text.train) / 1e6:.1f} MB of text, {len(text.validation) / 1e6:.1f} MB held "
                f"out; device {settings.device}"
            )
        runs = [train(settings, text, ranks=ranks)]
    if not ranks.first:
        return 0
    if args.compare:
        alone = replace(settings, attention=args.compare, context_parallel=1)
        runs.append(train(alone, text, sample_length=0))
    report(runs, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
