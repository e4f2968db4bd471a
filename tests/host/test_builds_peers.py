"""Who is timed beside the builds of `python -m benchmarks builds`."""

import pytest
import torch

from benchmarks.baselines import BSHD, Implementation
from benchmarks.builds import command


def test_peers_are_found_by_name_and_a_missing_one_is_named(monkeypatch):
    made = [Implementation(name, name, BSHD, None, "1") for name in ("flash3", "cudnn", "fa2")]
    missing = {"fa3": "flash_attn_interface: not installed"}
    monkeypatch.setattr(command, "find_implementations", lambda device: (made, missing))
    gpu = torch.device("cuda")
    assert [peer.name for peer in command.find_peers(["fa2", "cudnn"], gpu)] == ["fa2", "cudnn"]
    with pytest.raises(ValueError, match="--peers: fa3: flash_attn_interface: not installed"):
        command.find_peers(["cudnn", "fa3"], gpu)
    with pytest.raises(ValueError, match="--peers: flash3: one of cudnn, fa2 is accepted"):
        command.find_peers(["flash3"], gpu)
    assert [peer.name for peer in command.find_peers(["cudnn"], torch.device("cpu"))] == [
        "cudnn",
        "fa2",
    ]
