"""Every kernel that exists, one row each.

A row names what a call asks for (dtype, head_dim, mask, layout), how the kernel runs it (the tile) and the experiment in
``docs/experiments/`` that chose the tile. The same row generates the ``.cu`` file, the dispatch entry and what
``csrc/launch/plan.cpp`` reads, so host and device cannot disagree. An axis is here only if it changes the shared-memory
layout, the registers, the instructions or the load path; all else is a run-time parameter.
"""

# ruff: noqa: E501  (a row of the tables is one line)
from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

DTYPES = ("f16", "bf16")  # of FORWARD and BACKWARD; FP8 is e4m3
# "local" rows take windows, chunks and soft capping, in any combination: they are run-time parameters.
MASKS = ("full", "causal", "local")
LAYOUTS = (
    "dense",
    "packed",
)  # (batch, seqlen, ...), or sequences of any lengths one after the other


@dataclass(frozen=True)
class Key:
    dtype: str
    head_dim: int  # of q and k
    mask: str
    layout: str = "dense"
    v: int | None = None  # head_dim of v and out, where it is another

    @property
    def head_dim_v(self) -> int:
        return self.v or self.head_dim

    @property
    def suffix(self) -> str:
        v = f"_v{self.v}" if self.v else ""
        packed = "" if self.layout == "dense" else f"_{self.layout}"
        return f"{self.dtype}_hd{self.head_dim}{v}_{self.mask}{packed}"


@dataclass(frozen=True)
class Fwd:
    """A forward row: ``m`` query rows per CTA tile, ``n`` keys per step."""

    key: Key
    m: int
    n: int
    kv_stages: int
    q_stages: int
    mma_warpgroups: int
    pingpong: bool
    dynamic_schedule: bool
    why: str
    tag: str = (
        ""  # ends the name: tells tiles of one key apart, of which two_level or the queries choose
    )
    guesses: bool = False  # P relative to earlier blocks' maxima, checked afterwards
    overlap: bool = True  # e4m3: softmax beside P V of its own warpgroup
    two_level: bool = False  # e4m3: O is summed in fp32 outside the tensor cores

    @property
    def name(self) -> str:
        return _name("fwd", self.key, self.tag)


@dataclass(frozen=True)
class Bwd:
    """A backward row: ``n`` keys owned by a CTA, ``m`` query rows per step."""

    key: Key
    m: int
    n: int
    q_stages: int
    do_stages: int
    mma_warpgroups: int
    why: str
    tag: str = ""  # as in Fwd

    @property
    def name(self) -> str:
        return _name("bwd", self.key, self.tag)


def _name(kind: str, key: Key, tag: str) -> str:
    return "_".join([kind, key.suffix, *([tag] if tag else [])])


def is_fp8(row: Fwd | Bwd) -> bool:
    """Whether the row is one of csrc/kernels/fp8: e4m3 operands, for both GEMMs."""
    return row.key.dtype == "e4m3"


def _fwd(head_dim: int, mask: str, v: int | None = None, **tile) -> list[Fwd]:
    return [Fwd(Key(dtype, head_dim, mask, v=v), **tile) for dtype in DTYPES]


def _fp8(head_dim: int, mask: str, **tile) -> Fwd:
    return Fwd(Key("e4m3", head_dim, mask), **tile)


def _bwd(head_dim: int, mask: str, v: int | None = None, **tile) -> list[Bwd]:
    return [Bwd(Key(dtype, head_dim, mask, v=v), **tile) for dtype in DTYPES]


# fmt: off
FORWARD: list[Fwd] = [
    *_fwd( 64, "full",   m=192, n=128, kv_stages=3, q_stages=2, mma_warpgroups=3, pingpong=True,  dynamic_schedule=False, guesses=True,  why="E028"),
    *_fwd( 64, "causal", m=192, n=128, kv_stages=3, q_stages=2, mma_warpgroups=3, pingpong=True,  dynamic_schedule=True,  guesses=True,  why="E028"),
    *_fwd( 64, "local",  m=128, n=128, kv_stages=2, q_stages=2, mma_warpgroups=2, pingpong=True,  dynamic_schedule=True,  why="E025"),
    *_fwd(128, "full",   m=128, n=128, kv_stages=2, q_stages=2, mma_warpgroups=2, pingpong=False, dynamic_schedule=False, guesses=True,  why="E028"),
    *_fwd(128, "causal", m=128, n=128, kv_stages=2, q_stages=2, mma_warpgroups=2, pingpong=False, dynamic_schedule=True,  guesses=True,  why="E028"),
    *_fwd(128, "local",  m=128, n=128, kv_stages=2, q_stages=2, mma_warpgroups=2, pingpong=False, dynamic_schedule=True,  why="E025"),
    *_fwd(192, "full",   m=128, n=112, kv_stages=2, q_stages=1, mma_warpgroups=2, pingpong=True,  dynamic_schedule=False, why="E016"),
    *_fwd(192, "causal", m=128, n=96,  kv_stages=2, q_stages=1, mma_warpgroups=2, pingpong=True,  dynamic_schedule=True,  why="E027"),
    *_fwd(256, "full",   m=128, n=64,  kv_stages=2, q_stages=1, mma_warpgroups=2, pingpong=True,  dynamic_schedule=False, why="E027"),
    *_fwd(256, "causal", m=128, n=64,  kv_stages=2, q_stages=1, mma_warpgroups=2, pingpong=True,  dynamic_schedule=True,  why="E027"),
    *_fwd(256, "local",  m=128, n=80,  kv_stages=2, q_stages=1, mma_warpgroups=2, pingpong=True,  dynamic_schedule=True,  why="E025"),
]

BACKWARD: list[Bwd] = [
    *_bwd( 64, "full",   m=128, n=128, q_stages=2, do_stages=2, mma_warpgroups=2, why="E010"),
    *_bwd( 64, "causal", m=128, n=128, q_stages=2, do_stages=2, mma_warpgroups=2, why="E010"),
    *_bwd( 64, "local",  m=64,  n=128, q_stages=4, do_stages=2, mma_warpgroups=2, why="E025"),
    *_bwd(128, "full",   m=64,  n=128, q_stages=4, do_stages=2, mma_warpgroups=2, why="E004"),
    *_bwd(128, "causal", m=64,  n=128, q_stages=4, do_stages=2, mma_warpgroups=2, why="E004"),
    *_bwd(128, "local",  m=64,  n=128, q_stages=4, do_stages=2, mma_warpgroups=2, why="E025"),
    *_bwd(256, "full",   m=64,  n=64,  q_stages=2, do_stages=2, mma_warpgroups=2, why="E018"),
    *_bwd(256, "causal", m=64,  n=64,  q_stages=2, do_stages=2, mma_warpgroups=2, why="E018"),
    *_bwd(256, "local",  m=64,  n=64,  q_stages=2, do_stages=2, mma_warpgroups=2, why="E025"),
]
# fmt: on


def _packed(rows: list, **tile) -> list:
    """The same tiles for packed sequences: only where rows are loaded from and stored to differs (E017)."""
    return [replace(row, key=replace(row.key, layout="packed"), why="E017", **tile) for row in rows]


# Sequences differ in length, so their tiles always go by the counter.
FORWARD += _packed(FORWARD, dynamic_schedule=True)
BACKWARD += _packed(BACKWARD)

# Dense only: packed calls of these head_dims run on the next row above (E022).
# fmt: off
FORWARD += [
    *_fwd( 96, "full",          m=192, n=112, kv_stages=2, q_stages=2, mma_warpgroups=3, pingpong=True,  dynamic_schedule=False, why="E022"),
    *_fwd( 96, "causal",        m=192, n=112, kv_stages=2, q_stages=2, mma_warpgroups=3, pingpong=True,  dynamic_schedule=True,  why="E022"),
    *_fwd(192, "full",   v=128, m=128, n=128, kv_stages=2, q_stages=1, mma_warpgroups=2, pingpong=True,  dynamic_schedule=False, guesses=True,  why="E028"),
    *_fwd(192, "causal", v=128, m=128, n=128, kv_stages=2, q_stages=1, mma_warpgroups=2, pingpong=True,  dynamic_schedule=True,  guesses=True,  why="E028"),
]
# A second tile of a key, for the numbers of queries that it suits better.
FORWARD += [
    *_fwd( 64, "full",          m=128, n=128, kv_stages=3, q_stages=2, mma_warpgroups=2, pingpong=True,  dynamic_schedule=False, guesses=True,  why="E030", tag="m128"),
]
BACKWARD += [
    *_bwd( 96, "full",          m=64,  n=128, q_stages=4, do_stages=2, mma_warpgroups=2, why="E022"),
    *_bwd( 96, "causal",        m=64,  n=128, q_stages=4, do_stages=2, mma_warpgroups=2, why="E022"),
    *_bwd(192, "full",          m=64,  n=64,  q_stages=2, do_stages=2, mma_warpgroups=2, why="E022"),
    *_bwd(192, "causal",        m=64,  n=64,  q_stages=2, do_stages=2, mma_warpgroups=2, why="E022"),
    *_bwd(192, "full",   v=128, m=64,  n=64,  q_stages=2, do_stages=2, mma_warpgroups=2, why="E022"),
    *_bwd(192, "causal", v=128, m=64,  n=64,  q_stages=2, do_stages=2, mma_warpgroups=2, why="E022"),
]
# fmt: on

# fmt: off
FP8: list[Fwd] = [
    _fp8( 64, "full",   m=192, n=128, kv_stages=4, q_stages=2, mma_warpgroups=3, pingpong=True,  dynamic_schedule=False, guesses=True,  why="E032"),
    _fp8( 64, "causal", m=192, n=128, kv_stages=4, q_stages=2, mma_warpgroups=3, pingpong=False, dynamic_schedule=True,  guesses=True,  why="E032"),
    _fp8(128, "full",   m=128, n=192, kv_stages=2, q_stages=2, mma_warpgroups=2, pingpong=True,  dynamic_schedule=False, guesses=True,  why="E032"),
    _fp8(128, "causal", m=128, n=128, kv_stages=4, q_stages=2, mma_warpgroups=2, pingpong=False, dynamic_schedule=True,  guesses=True,  why="E032"),
    _fp8(256, "full",   m=128, n=128, kv_stages=2, q_stages=1, mma_warpgroups=2, pingpong=True,  dynamic_schedule=False, guesses=True,  why="E032", overlap=False),
    _fp8(256, "causal", m=128, n=128, kv_stages=2, q_stages=1, mma_warpgroups=2, pingpong=False, dynamic_schedule=True,  guesses=True,  why="E032", overlap=False),
    # A second tile, for the numbers of keys that it suits better.
    _fp8(128, "full",   m=128, n=128, kv_stages=2, q_stages=2, mma_warpgroups=2, pingpong=True,  dynamic_schedule=False, guesses=True,  why="E032", tag="n128"),
    # O summed in fp32 outside the tensor cores takes registers for a second accumulator.
    _fp8( 64, "full",   m=128, n=128, kv_stages=2, q_stages=2, mma_warpgroups=2, pingpong=True,  dynamic_schedule=False, why="E023", two_level=True, tag="twolevel"),
    _fp8( 64, "causal", m=128, n=128, kv_stages=2, q_stages=2, mma_warpgroups=2, pingpong=True,  dynamic_schedule=True,  why="E023", two_level=True, tag="twolevel"),
    _fp8(128, "full",   m=128, n=64,  kv_stages=2, q_stages=2, mma_warpgroups=2, pingpong=True,  dynamic_schedule=False, why="E023", two_level=True, tag="twolevel"),
    _fp8(128, "causal", m=128, n=64,  kv_stages=2, q_stages=2, mma_warpgroups=2, pingpong=True,  dynamic_schedule=True,  why="E023", two_level=True, tag="twolevel"),
]
# fmt: on

# What a machine without a Hopper GPU builds by default: enough to compile every path once.
CORE = (
    "fwd_bf16_hd128_full",
    "fwd_bf16_hd64_causal",
    "fwd_bf16_hd192_full",
    "fwd_bf16_hd256_causal",
    "fwd_bf16_hd128_causal_packed",
    "fwd_bf16_hd128_local",
    "bwd_bf16_hd128_causal",
    "bwd_bf16_hd64_full",
    "bwd_bf16_hd256_causal",
    "bwd_bf16_hd64_causal_packed",
    "fwd_e4m3_hd128_causal",
    "bwd_bf16_hd128_local",
    "fwd_bf16_hd96_causal",
    "fwd_bf16_hd192_v128_full",
    "bwd_bf16_hd96_full",
    "bwd_bf16_hd192_causal",
    "bwd_bf16_hd192_v128_causal",
)


def all_rows() -> list[Fwd | Bwd]:
    return list(itertools.chain(FORWARD, FP8, BACKWARD))
