"""Who is measured: flash3 and the attention libraries found, each called in its natural layout."""

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BSHD = "bshd"  # (batch, seqlen, heads, head_dim): flash3 and the flash-attn packages
BHSD = "bhsd"  # (batch, heads, seqlen, head_dim): torch's scaled_dot_product_attention


@dataclass(frozen=True)
class Implementation:
    """forward(q, k, v, causal) -> out, all contiguous in `layout`, inside `context()`."""

    name: str
    label: str
    layout: str
    forward: Callable[..., torch.Tensor]
    version: str
    context: Callable[[], AbstractContextManager] = nullcontext


def sdpa(q, k, v, causal: bool) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )


def torch_sdpa(name: str, label: str, backend: SDPBackend, version: str) -> Implementation:
    return Implementation(name, label, BHSD, sdpa, version, partial(sdpa_kernel, backend))


def import_first(module_names: tuple[str, ...]):
    """The first of these modules that is installed; raises the last one's ImportError when none is."""
    for module_name in module_names[:-1]:
        if importlib.util.find_spec(module_name) is not None:
            return importlib.import_module(module_name)
    return importlib.import_module(module_names[-1])


def from_package(name: str, label: str, module_names: tuple[str, ...]) -> Implementation:
    """An implementation whose module offers flash_attn_func(q, k, v, causal=...).

    Raises ImportError (or what the package's import raises) when it isn't there.
    """
    module = import_first(module_names)
    function = module.flash_attn_func

    def forward(q, k, v, causal: bool) -> torch.Tensor:
        result = function(q, k, v, causal=causal)
        return result[0] if isinstance(result, tuple) else result  # some return (out, lse)

    version = getattr(module, "__version__", "unknown")
    return Implementation(name, label, BSHD, forward, version)


PACKAGES = {  # name -> (label, modules, the first that is installed counts)
    "flash_attn": ("flash-attn (FA2)", ("flash_attn",)),
    # The second is FlashAttention-3's own code in a forward-only bfloat16 wheel (fa3-fwd on PyPI).
    "fa3": ("official FA3", ("flash_attn_interface", "fa3_fwd_interface")),
    "fa4": ("FA4 (CuTe DSL)", ("flash_attn.cute",)),
}


def torch_baselines(device: torch.device) -> tuple[list[Implementation], dict[str, str]]:
    """torch's own kernels for `device`, and the reason for each that can't run there."""
    if device.type == "cuda":
        cudnn = str(torch.backends.cudnn.version())
        return [
            torch_sdpa("cudnn", "torch SDPA cuDNN", SDPBackend.CUDNN_ATTENTION, cudnn),
            torch_sdpa("fa2", "torch SDPA FA2", SDPBackend.FLASH_ATTENTION, torch.__version__),
        ], {}
    reason = f"needs a CUDA device, this run is on {device.type}"
    cpu = torch_sdpa("sdpa", "torch SDPA", SDPBackend.FLASH_ATTENTION, torch.__version__)
    return [cpu], {"cudnn": reason, "fa2": reason}


def flash3_implementation(name: str, label: str, **arguments) -> Implementation:
    import flash3

    def forward(q, k, v, causal: bool) -> torch.Tensor:
        return flash3.flash_attn_func(q, k, v, causal=causal, **arguments)

    return Implementation(name, label, BSHD, forward, getattr(flash3, "__version__", "unknown"))


def find_implementations(
    device: torch.device, deterministic: bool = False
) -> tuple[list[Implementation], dict[str, str]]:
    """flash3 first, with ``deterministic`` its deterministic gradients too, then every baseline found; and name -> why
    for each that is missing."""
    implementations = [flash3_implementation("flash3", "flash3")]
    if deterministic:
        label = "flash3, deterministic"
        implementations.append(flash3_implementation("flash3_det", label, deterministic=True))
    found, missing = torch_baselines(device)
    implementations += found
    for name, (label, module_names) in PACKAGES.items():
        if device.type != "cuda":
            missing[name] = f"needs a CUDA device, this run is on {device.type}"
            continue
        try:
            implementations.append(from_package(name, label, module_names))
        except Exception as error:  # a broken install raises more than ImportError
            missing[name] = f"{' or '.join(module_names)}: {type(error).__name__}: {error}"
    return implementations, missing


def reference_sdpa() -> Implementation:
    """SDPA's unfused path, slow and large, for a gate that has no other baseline to ask."""
    return torch_sdpa("math", "torch SDPA math", SDPBackend.MATH, torch.__version__)
