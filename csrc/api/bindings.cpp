// The module flash3._C: loading it registers the ops (ops.cpp), and these functions say what the
// build holds and how it would run a call. They work without a GPU.

// This file uses no torch header. It is compiled with the flags of the files that do, and the
// pybind11 that torch ships refuses to be included under a stable-ABI target; without the macro any
// pybind11 on the include path will do.
#undef TORCH_TARGET_VERSION

#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "names.h"
#include "plan.h"

// Set by setup.py.
#ifndef FLASH3_CUTLASS_VERSION
#define FLASH3_CUTLASS_VERSION unknown
#endif
#define FLASH3_TEXT_OF(token) #token
#define FLASH3_TEXT(macro) FLASH3_TEXT_OF(macro)

namespace py = pybind11;
using namespace py::literals;

namespace flash3 {
namespace {

template <class Enum>
Enum from_word(std::string const& given, char const* argument,
               std::initializer_list<Enum> accepted) {
  std::string words;
  for (Enum const value : accepted) {
    if (given == word(value)) return value;
    words += (words.empty() ? "" : " or ") + std::string(word(value));
  }
  throw py::value_error(std::string(argument) + " must be " + words + ", got '" + given + "'");
}

DType dtype_from(std::string const& given) {
  return from_word(given, "dtype", {DType::kF16, DType::kBF16});
}

MaskKind mask_from(std::string const& given) {
  return from_word(given, "mask", {MaskKind::kFull, MaskKind::kCausal, MaskKind::kLocal});
}

SeqLayout layout_from(std::string const& given) {
  return from_word(given, "layout", {SeqLayout::kDense, SeqLayout::kPacked});
}

py::dict to_dict(FwdTile const& tile) {
  return py::dict("m"_a = tile.m, "n"_a = tile.n, "kv_stages"_a = tile.kv_stages,
                  "q_stages"_a = tile.q_stages, "mma_warpgroups"_a = tile.mma_warpgroups,
                  "pingpong"_a = tile.pingpong, "dynamic_schedule"_a = tile.dynamic_schedule,
                  "guesses"_a = tile.guesses, "overlap"_a = tile.overlap,
                  "two_level"_a = tile.two_level);
}

py::dict to_dict(BwdTile const& tile) {
  return py::dict("m"_a = tile.m, "n"_a = tile.n, "q_stages"_a = tile.q_stages,
                  "do_stages"_a = tile.do_stages, "mma_warpgroups"_a = tile.mma_warpgroups);
}

template <class Entry>
py::dict describe_row(Entry const& row, char const* pass) {
  return py::dict("name"_a = row.name, "pass"_a = pass, "dtype"_a = word(row.key.dtype),
                  "head_dim"_a = row.key.head_dim, "head_dim_v"_a = row.key.head_dim_v,
                  "mask"_a = word(row.key.mask), "layout"_a = word(row.key.layout),
                  "tile"_a = to_dict(row.tile), "why"_a = row.why);
}

py::list variants() {
  py::list rows;
  for (FwdEntry const& row : fwd_table()) {
    rows.append(describe_row(row, row.key.dtype == DType::kE4M3 ? "fp8" : "fwd"));
  }
  for (BwdEntry const& row : bwd_table()) rows.append(describe_row(row, "bwd"));
  return rows;
}

py::dict build_info() {
  std::string const cuda =
      std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
  return py::dict("cuda_version"_a = cuda, "arch"_a = "sm_90a", "torch_target"_a = "2.10",
                  "cutlass_version"_a = FLASH3_TEXT(FLASH3_CUTLASS_VERSION),
                  "compiler"_a = __VERSION__);
}

void check_extents(Problem const& problem, int num_sms) {
  bool const positive = problem.batch > 0 && problem.seqlen_q > 0 && problem.seqlen_k > 0 &&
                        problem.num_heads_q > 0 && problem.num_heads_kv > 0 &&
                        problem.head_dim > 0 && num_sms > 0;
  if (!positive)
    throw py::value_error(
        "every extent and num_sms must be at least 1: an empty call launches nothing");
  if (problem.num_heads_q % problem.num_heads_kv != 0) {
    throw py::value_error("num_heads_kv must divide num_heads_q, " +
                          std::to_string(problem.num_heads_q) + ", got " +
                          std::to_string(problem.num_heads_kv));
  }
  if (problem.head_dim % 8 != 0) {
    throw py::value_error("head_dim must be a multiple of 8, got " +
                          std::to_string(problem.head_dim));
  }
  if (problem.head_dim_v <= 0 || problem.head_dim_v % 8 != 0) {
    throw py::value_error("head_dim_v must be a positive multiple of 8, got " +
                          std::to_string(problem.head_dim_v));
  }
}

py::dict describe_plan(Problem const& problem, FwdPlan const& plan, int num_sms) {
  return py::dict("row"_a = plan.row->name, "tile"_a = to_dict(plan.row->tile),
                  "grid"_a = plan.grid, "workspace_bytes"_a = plan.workspace_bytes,
                  "why"_a = explain(problem, plan, num_sms), "tiles"_a = plan.tiles);
}

py::dict describe_plan(Problem const& problem, BwdPlan const& plan, Order order) {
  py::dict const offsets("dq_accum"_a = plan.dq_accum_offset, "lse_log2"_a = plan.lse_log2_offset,
                         "dpsum"_a = plan.dpsum_offset, "dq_turn"_a = plan.dq_turn_offset);
  return py::dict("row"_a = plan.row->name, "tile"_a = to_dict(plan.row->tile),
                  "grid"_a = plan.grid, "cluster_size"_a = plan.cluster_size,
                  "workspace_bytes"_a = plan.workspace_bytes,
                  "why"_a = explain(problem, plan, order),
                  "seqlen_q_rounded"_a = plan.seqlen_q_rounded, "workspace_offsets"_a = offsets);
}

py::dict plan(std::string const& pass, std::string const& dtype, std::string const& mask, int batch,
              int seqlen_q, int seqlen_k, int num_heads_q, int num_heads_kv, int head_dim,
              int num_sms, bool deterministic, std::string const& layout,
              std::optional<int> head_dim_v) {
  Problem const problem{.dtype = dtype_from(dtype),
                        .mask = mask_from(mask),
                        .layout = layout_from(layout),
                        .batch = batch,
                        .seqlen_q = seqlen_q,
                        .seqlen_k = seqlen_k,
                        .num_heads_q = num_heads_q,
                        .num_heads_kv = num_heads_kv,
                        .head_dim = head_dim,
                        .head_dim_v = head_dim_v.value_or(head_dim)};
  check_extents(problem, num_sms);
  if (pass == "fwd") return describe_plan(problem, plan_fwd(problem, num_sms), num_sms);
  if (pass == "bwd") {
    Order const order = deterministic ? Order::kDeterministic : Order::kFree;
    return describe_plan(problem, plan_bwd(problem, order, num_sms), order);
  }
  throw py::value_error("pass must be fwd or bwd, got '" + pass + "'");
}

}  // namespace
}  // namespace flash3

PYBIND11_MODULE(_C, module) {
  module.doc() =
      "The compiled half of flash3; loading it registers the CUDA implementations of "
      "torch.ops.flash3.";
  module.def("build_info", &flash3::build_info, "Versions that this module was compiled with.");
  module.def("variants", &flash3::variants, "One dict per kernel row in this build.");
  module.def(
      "plan", &flash3::plan, "pass_"_a, "dtype"_a, "mask"_a, "batch"_a, "seqlen_q"_a, "seqlen_k"_a,
      "num_heads_q"_a, "num_heads_kv"_a, "head_dim"_a, "num_sms"_a = 132, "deterministic"_a = false,
      "layout"_a = "dense", "head_dim_v"_a = py::none(),
      "How a call would run: row, tile, grid, workspace_bytes and why. pass_ is 'fwd' or "
      "'bwd', dtype 'f16' or 'bf16', mask 'full', 'causal' or 'local', layout 'dense' or 'packed', "
      "for which seqlen_q and seqlen_k are rows of all sequences together; head_dim_v None is "
      "head_dim. ValueError on another word; RuntimeError if no built row serves it.");
}
