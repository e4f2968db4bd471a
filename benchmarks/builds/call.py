"""One call of a row: its tensors, its workspace, and the struct that C++ reads."""

import math
from dataclasses import dataclass

import torch

from .library import Call, Library, Row

RESULTS = {"fwd": ("out", "lse"), "bwd": ("dq", "dk", "dv")}
INPUTS = {"fwd": ("q", "k", "v"), "bwd": ("q", "k", "v", "out", "lse", "dout")}


@dataclass
class RowCall:
    """Calling it launches the row once, on the stream that was current when it was made.

    ``tensors`` holds inputs and results by name, all contiguous: q, dq (b, sq, hq, d); out, dout (b, sq, hq, dv); k, dk
    (b, sk, hk, d); v, dv (b, sk, hk, dv); lse (b, hq, sq) float32.
    """

    library: Library
    row: Row
    tensors: dict[str, torch.Tensor]
    workspace: torch.Tensor
    call: Call

    def __call__(self) -> None:
        self.library.launch(self.row.mode, self.call)

    def results(self) -> dict[str, torch.Tensor]:
        return {name: self.tensors[name] for name in RESULTS[self.row.mode]}

    def poison(self) -> None:
        """NaN in every result, and every byte of the backward's workspace set: what is not written shows."""
        for tensor in self.results().values():
            tensor.fill_(math.nan)
        if self.row.mode == "bwd":
            self.workspace.fill_(255)


def make_results(mode: str, q, k, v) -> dict[str, torch.Tensor]:
    if mode == "bwd":
        return {name: torch.empty_like(x) for name, x in zip(RESULTS[mode], (q, k, v), strict=True)}
    batch, seqlen_q, heads_q, _ = q.shape
    lse = torch.empty((batch, heads_q, seqlen_q), dtype=torch.float32, device=q.device)
    out = torch.empty((batch, seqlen_q, heads_q, v.shape[-1]), dtype=q.dtype, device=q.device)
    return {"out": out, "lse": lse}


def prepare(
    library: Library, row: Row, values: dict[str, torch.Tensor], deterministic: bool = False
) -> RowCall:
    """A call of ``row`` on ``values`` (its INPUTS, contiguous), with scale head_dim^-0.5."""
    inputs = {name: values[name] for name in INPUTS[row.mode]}
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    for name, tensor in inputs.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous")
    tensors = {**inputs, **make_results(row.mode, q, k, v)}
    batch, seqlen_q, heads_q, head_dim = q.shape
    cuda = q.device.type == "cuda"
    call = Call(
        row=row.index,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=k.shape[1],
        num_heads_q=heads_q,
        num_heads_kv=k.shape[2],
        head_dim=head_dim,
        head_dim_v=v.shape[-1],
        num_sms=torch.cuda.get_device_properties(q.device).multi_processor_count if cuda else 1,
        deterministic=deterministic,
        softmax_scale=head_dim**-0.5,
        stream=torch.cuda.current_stream(q.device).cuda_stream if cuda else None,
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
    )
    # Zeros: the forward's is a tile counter, which a launch leaves at 0.
    workspace = torch.zeros(
        library.workspace_bytes(row.mode, call), dtype=torch.uint8, device=q.device
    )
    call.workspace = workspace.data_ptr()
    return RowCall(library, row, tensors, workspace, call)
