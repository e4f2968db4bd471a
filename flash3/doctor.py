"""``python -m flash3.doctor``: what this installation has, whether it works, and how a call would run.

Every probe is guarded, so the report is always complete. The exit status is 0 if everything that should work on this
machine does: the CPU path everywhere, and the kernels where a Hopper GPU is visible. ``--json`` prints the same report
as JSON. ``--plan b=2 hq=32 hkv=8 sq=1024 sk=8192 hd=128 causal dtype=bf16`` prints instead the kernel row, tile, grid
and workspace that serve such a call, and why; it needs the compiled module but no GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType

import torch

import flash3
from flash3 import checks, selfcheck

OK, SKIP, FAIL = "ok", "skip", "fail"

H200_SMS = 132  # streaming multiprocessors, the same on H100 SXM

HOW_TO_BUILD = (
    "build them with `pip install .` in a checkout, beside a CUDA build of torch and with nvcc"
)


@dataclass
class Probe:
    """One line of the report: a status, a headline, and lines of detail below it."""

    name: str
    status: str
    headline: str
    details: list[str] = field(default_factory=list)


def run_probe(name: str, probe: Callable[[], Probe]) -> Probe:
    try:
        return probe()
    except Exception as error:  # a report with a hole in it helps nobody
        return Probe(name, FAIL, f"{type(error).__name__}: {error}")


def examine() -> list[Probe]:
    """Runs every probe, in the order of the report."""
    probes = {
        "flash3": probe_package,
        "torch": probe_torch,
        "driver": probe_driver,
        "GPU": probe_gpus,
        "kernels": probe_kernels,
        "CPU path": probe_cpu_path,
        "GPU path": probe_gpu_path,
    }
    return [run_probe(name, probe) for name, probe in probes.items()]


def probe_package() -> Probe:
    where = Path(flash3.__file__).parent
    return Probe(
        "flash3",
        OK,
        f"{flash3.__version__} in {where}",
        [f"Python {platform.python_version()} on {platform.platform()}"],
    )


def probe_torch() -> Probe:
    if torch.version.cuda is None:
        return Probe("torch", OK, f"{torch.__version__}, a build without CUDA")
    number = torch.backends.cudnn.version()  # 91900 is 9.19.0
    cudnn = (
        f"cuDNN {number // 10000}.{number // 100 % 100}.{number % 100}" if number else "no cuDNN"
    )
    return Probe("torch", OK, f"{torch.__version__}, CUDA {torch.version.cuda}, {cudnn}")


def probe_driver() -> Probe:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Probe("driver", SKIP, f"nvidia-smi gave no answer ({type(error).__name__})")
    versions = sorted(set(answer.stdout.split()))
    return Probe("driver", OK, "NVIDIA " + ", ".join(versions or ["of unknown version"]))


def visible_gpus() -> list[tuple[str, tuple[int, int], int, int]]:
    """Name, compute capability, number of SMs and bytes of memory of each GPU that torch sees."""
    if not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        capability = (gpu.major, gpu.minor)
        gpus.append((gpu.name, capability, gpu.multi_processor_count, gpu.total_memory))
    return gpus


def hopper_index() -> int | None:
    """The first GPU that the kernels run on."""
    capabilities = [capability for _, capability, _, _ in visible_gpus()]
    return capabilities.index(checks.HOPPER) if checks.HOPPER in capabilities else None


def probe_gpus() -> Probe:
    gpus = visible_gpus()
    if not gpus:
        return Probe("GPU", SKIP, "torch sees none; calls run on the CPU reference path")
    details = [
        f"cuda:{index} {name}, compute capability {major}.{minor}, {sms} SMs, {memory / 2**30:.0f} GiB"
        for index, (name, (major, minor), sms, memory) in enumerate(gpus)
    ]
    if hopper_index() is None:
        return Probe(
            "GPU", SKIP, "none is a Hopper (9.0), and the kernels run on no other", details
        )
    return Probe("GPU", OK, f"{len(gpus)} visible", details)


def load_kernels() -> ModuleType:
    """The compiled module flash3._C. Raises ImportError, with a remedy if it was never built."""
    try:
        return importlib.import_module("flash3._C")
    except ModuleNotFoundError as error:
        if error.name != "flash3._C":
            raise
        raise ModuleNotFoundError(
            f"the kernels are not built; {HOW_TO_BUILD}", name=error.name
        ) from None


def missing_for_a_build() -> list[str]:
    """What stands in the way of compiling the kernels here, one line each."""
    missing = []
    if torch.version.cuda is None:
        missing.append("this torch is built without CUDA: install a CUDA build of torch")
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    nvccs = [home / "bin" / "nvcc" for home in (*homes, Path("/usr/local/cuda"))]
    if not shutil.which("nvcc") and not any(nvcc.exists() for nvcc in nvccs):
        missing.append(
            "nvcc was not found: install the CUDA toolkit, or set CUDA_HOME to its folder"
        )
    return missing


def probe_kernels() -> Probe:
    try:
        module = load_kernels()
    except ImportError as error:
        # Without a Hopper GPU nothing needs them.
        status = SKIP if hopper_index() is None else FAIL
        return Probe("kernels", status, str(error), missing_for_a_build())
    info = module.build_info()
    rows = module.variants()
    built_with = ", ".join(f"{key} {value}" for key, value in info.items())
    names = [f"{row['name']}: tile {tile_text(row['tile'])} ({row['why']})" for row in rows]
    return Probe("kernels", OK, f"{len(rows)} rows built", [built_with, *names])


def tile_text(tile: dict) -> str:
    """ "128x176, kv_stages 2, ..."."""
    rest = ", ".join(f"{key} {value}" for key, value in tile.items() if key not in ("m", "n"))
    return f"{tile['m']}x{tile['n']}, {rest}"


def probe_cpu_path() -> Probe:
    results = [selfcheck.check_cpu_path(causal) for causal in (False, True)]
    good = all(ok for ok, _ in results)
    headline = "forward and backward agree with float64" if good else "WRONG results"
    return Probe("CPU path", OK if good else FAIL, headline, [line for _, line in results])


def probe_gpu_path() -> Probe:
    index = hopper_index()
    if index is None:
        return Probe("GPU path", SKIP, "no Hopper GPU to run the kernels on")
    rows = load_kernels().variants()
    results = [selfcheck.check_row(row, torch.device("cuda", index)) for row in rows]
    wrong = sum(not ok for ok, _ in results)
    status = FAIL if wrong or not rows else OK
    headline = f"{len(rows) - wrong} of {len(rows)} kernels agree with float64 on cuda:{index}"
    return Probe("GPU path", status, headline, [line for _, line in results])


PLAN_SIZES = {"b": 1, "hq": 16, "hkv": None, "sq": 4096, "sk": None, "hd": 128, "hdv": None}
PLAN_MASKS = ("full", "causal", "local")
PLAN_WORDS = (*PLAN_MASKS, "fwd", "bwd", "deterministic")
PLAN_DTYPES = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "f16": "f16",
    "fp16": "f16",
    "float16": "f16",
    "half": "f16",
}


def parse_plan(words: list[str]) -> dict:
    """The call that ``--plan`` describes. Raises ValueError for a word that it does not know."""
    call: dict = {**PLAN_SIZES, "dtype": "bf16", "mask": "full", "passes": ["fwd", "bwd"]}
    call["deterministic"] = "deterministic" in words
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key in PLAN_SIZES:
            if not value.isdecimal() or int(value) == 0:
                raise ValueError(f"--plan: {key} must be a positive whole number, got '{value}'")
            call[key] = int(value)
        elif equals and key == "dtype" and value in PLAN_DTYPES:
            call["dtype"] = PLAN_DTYPES[value]
        elif word in PLAN_MASKS:
            call["mask"] = word
        elif word in ("fwd", "bwd"):
            call["passes"] = [word]
        elif word not in PLAN_WORDS:
            sizes = ", ".join(f"{name}=N" for name in PLAN_SIZES)
            raise ValueError(
                f"--plan: unknown word '{word}'; known are {sizes}, dtype=bf16 or dtype=f16, "
                f"and {', '.join(PLAN_WORDS)}"
            )
    call["hkv"] = call["hkv"] or call["hq"]
    call["sk"] = call["sk"] or call["sq"]
    call["hdv"] = call["hdv"] or call["hd"]
    return call


def make_plans(call: dict) -> Iterator[dict]:
    """One dict per pass: what flash3._C.plan says, or {"pass", "error"}."""
    gpu = hopper_index()
    num_sms = H200_SMS if gpu is None else visible_gpus()[gpu][2]
    assumed = "assumed: no Hopper GPU is visible" if gpu is None else f"cuda:{gpu}"
    sizes = [call[name] for name in ("b", "sq", "sk", "hq", "hkv", "hd")]
    for name in call["passes"]:
        plan = {"pass": name, "num_sms": num_sms, "num_sms_from": assumed}
        try:
            found = load_kernels().plan(
                name, call["dtype"], call["mask"], *sizes, num_sms, call["deterministic"],
                "dense", call["hdv"],
            )  # fmt: skip
            yield {**plan, **found}
        except (ImportError, RuntimeError, ValueError) as error:
            yield {**plan, "error": str(error)}


def print_plan(plan: dict) -> None:
    print(f"{'forward' if plan['pass'] == 'fwd' else 'backward'}")
    if "error" in plan:
        print(f"  {plan['error']}")
        return
    print(f"  row        {plan['row']}")
    print(f"  tile       {tile_text(plan['tile'])}")
    print(f"  grid       {plan['grid']} CTAs on {plan['num_sms']} SMs ({plan['num_sms_from']})")
    print(f"  workspace  {plan['workspace_bytes']:,} bytes")
    print(f"  why        {plan['why']}")


def print_report(probes: list[Probe]) -> None:
    for probe in probes:
        print(f"[{probe.status:^4}] {probe.name:<9} {probe.headline}")
        for line in probe.details:
            print(f"       {'':<9} {line}")
    failed = [probe.name for probe in probes if probe.status == FAIL]
    print(f"\nNot well: {', '.join(failed)}." if failed else "\nAll that should work here does.")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flash3.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--plan",
        nargs="*",
        metavar="WORD",
        help="how a call would run, for example: b=2 hq=32 hkv=8 sq=1024 sk=8192 hd=128 causal dtype=bf16 "
        "(also: fwd or bwd for one pass, deterministic)",
    )
    options = parser.parse_args(arguments)
    if options.plan is not None:
        try:
            plans = list(make_plans(parse_plan(options.plan)))
        except ValueError as error:
            parser.error(str(error))
        if options.json:
            print(json.dumps(plans, indent=2))
        else:
            for plan in plans:
                print_plan(plan)
        return int(any("error" in plan for plan in plans))

    probes = examine()
    good = all(probe.status != FAIL for probe in probes)
    if options.json:
        print(json.dumps({"ok": good, "probes": [asdict(probe) for probe in probes]}, indent=2))
    else:
        print_report(probes)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
