"""docs/support.md is what calls make of it."""

import inspect

import pytest

import flash3

support = pytest.importorskip("build_tools.support")


def test_the_document_is_true():
    """Written by `python build_tools/support.py --write`."""
    assert support.DOCUMENT.read_text() == support.document()


def test_a_feature_that_raises_is_seen(monkeypatch):
    def refuse(*args):
        raise NotImplementedError("softcap: no")

    assert support.verdict(support.dense, support.FEATURES["softcap"]) == support.YES
    monkeypatch.setattr("flash3.checks_options._check_softcap", refuse)
    for build in support.FUNCTIONS.values():
        assert support.verdict(build, support.FEATURES["softcap"]) == "NotImplementedError"


def test_a_gradient_that_is_missing_is_seen():
    assert support.verdict(support.dense, support.FLOAT8["alone"]) == support.FORWARD


def test_every_argument_is_on_the_page():
    """A new parameter of a function has to get a line."""
    listed = {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
    listed |= {"return_lse", "return_attn_probs", "seqused_q", "seqused_k"}
    listed |= {
        name.split("=")[0] for name in (*support.FEATURES, *support.FLOAT8, *support.REFUSED)
    }
    for function in (flash3.flash_attn_func, flash3.flash_attn_varlen_func):
        assert set(inspect.signature(function).parameters) <= listed
