// The rows of one build behind a C interface, so that several builds fit into one process
// (`python -m benchmarks builds`). Linked with the build's objects and tables.cpp and with the
// plan.cpp of its source tree; stands in for dispatch.cpp, because here the caller names the row.
// library.py has the Python side: structs, functions and kInterface must agree with it.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <stdexcept>
#include <string>

#include "names.h"
#include "plan.h"

extern "C" {

enum class Flash3Pass : int { kForward, kBackward };

struct Flash3Row {
  char const *name, *dtype, *mask, *why;
  int head_dim, head_dim_v;
  int tile_m, tile_n;
};

// One call of a row. Tensors are contiguous: q, dq (b, sq, hq, d); out, dout (b, sq, hq, dv); k, dk
// (b, sk, hk, d); v, dv (b, sk, hk, dv); lse (b, hq, sq) fp32. The forward reads no pointer after
// lse but the workspace.
struct Flash3Call {
  int row;
  int batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim, head_dim_v;
  int num_sms;
  int deterministic;
  float softmax_scale;
  void *q, *k, *v, *out, *lse;
  void *dout, *dq, *dk, *dv;
  void *workspace, *stream;
};

}  // extern "C"

namespace flash3 {
namespace {

constexpr int kInterface = 2;

// What find_fwd and find_bwd answer: the row of the call that is being planned.
FwdEntry const* fwd_row = nullptr;
BwdEntry const* bwd_row = nullptr;

std::string last_error;

template <class Entry>
Entry const& at(std::span<Entry const> table, int index) {
  if (index < 0 || index >= static_cast<int>(table.size())) {
    throw std::out_of_range("no row " + std::to_string(index) + " among " +
                            std::to_string(table.size()));
  }
  return table[static_cast<std::size_t>(index)];
}

template <class Entry>
Flash3Row describe(Entry const& row) {
  return {.name = row.name,
          .dtype = word(row.key.dtype),
          .mask = word(row.key.mask),
          .why = row.why,
          .head_dim = row.key.head_dim,
          .head_dim_v = row.key.head_dim_v,
          .tile_m = row.tile.m,
          .tile_n = row.tile.n};
}

Problem make_problem(Flash3Call const& call, KernelKey const& key) {
  auto const check = [](char const* what, int row, int asked) {
    if (asked > row) {
      throw std::invalid_argument("a row of " + std::string(what) + " " + std::to_string(row) +
                                  " cannot serve " + what + " " + std::to_string(asked));
    }
  };
  check("head_dim", key.head_dim, call.head_dim);
  check("head_dim_v", key.head_dim_v, call.head_dim_v);
  return {.dtype = key.dtype,
          .mask = key.mask,
          .batch = call.batch,
          .seqlen_q = call.seqlen_q,
          .seqlen_k = call.seqlen_k,
          .num_heads_q = call.num_heads_q,
          .num_heads_kv = call.num_heads_kv,
          .head_dim = call.head_dim,
          .head_dim_v = call.head_dim_v,
          .softmax_scale = call.softmax_scale};
}

TensorView view(void* ptr, int seqlen, int heads, int head_dim) {
  int64_t const row = int64_t{heads} * head_dim;
  return {.ptr = ptr, .batch_stride = seqlen * row, .seqlen_stride = row, .head_stride = head_dim};
}

struct Views {
  Flash3Call const& call;
  TensorView query(void* ptr) const {
    return view(ptr, call.seqlen_q, call.num_heads_q, call.head_dim);
  }
  TensorView key(void* ptr) const {
    return view(ptr, call.seqlen_k, call.num_heads_kv, call.head_dim);
  }
  TensorView value(void* ptr) const {
    return view(ptr, call.seqlen_k, call.num_heads_kv, call.head_dim_v);
  }
  TensorView output(void* ptr) const {
    return view(ptr, call.seqlen_q, call.num_heads_q, call.head_dim_v);
  }
};

FwdPlan make_fwd_plan(Flash3Call const& call) {
  fwd_row = &at(fwd_table(), call.row);
  return plan_fwd(make_problem(call, fwd_row->key), call.num_sms);
}

BwdPlan make_bwd_plan(Flash3Call const& call) {
  bwd_row = &at(bwd_table(), call.row);
  return plan_bwd(make_problem(call, bwd_row->key),
                  call.deterministic ? Order::kDeterministic : Order::kFree, call.num_sms);
}

void launch_forward(Flash3Call const& call) {
  FwdPlan const plan = make_fwd_plan(call);
  Views const views{call};
  plan.row->launch(
      {.problem = make_problem(call, plan.row->key),
       .q = views.query(call.q),
       .k = views.key(call.k),
       .v = views.value(call.v),
       .o = views.output(call.out),
       .lse = static_cast<float*>(call.lse),
       .tile_counter = plan.workspace_bytes > 0 ? static_cast<int*>(call.workspace) : nullptr,
       .grid = plan.grid},
      static_cast<cudaStream_t>(call.stream));
}

void launch_backward(Flash3Call const& call) {
  BwdPlan const plan = make_bwd_plan(call);
  Views const views{call};
  std::byte* const workspace = static_cast<std::byte*>(call.workspace);
  plan.row->launch(
      {.problem = make_problem(call, plan.row->key),
       .q = views.query(call.q),
       .k = views.key(call.k),
       .v = views.value(call.v),
       .o = views.output(call.out),
       .d_o = views.output(call.dout),
       .dq = views.query(call.dq),
       .dk = views.key(call.dk),
       .dv = views.value(call.dv),
       .lse = static_cast<float const*>(call.lse),
       .grid = plan.grid,
       .cluster_size = plan.cluster_size,
       .seqlen_q_rounded = plan.seqlen_q_rounded,
       .dq_accum = reinterpret_cast<float*>(workspace + plan.dq_accum_offset),
       .lse_log2 = reinterpret_cast<float*>(workspace + plan.lse_log2_offset),
       .dpsum = reinterpret_cast<float*>(workspace + plan.dpsum_offset),
       .dq_turn =
           call.deterministic ? reinterpret_cast<int*>(workspace + plan.dq_turn_offset) : nullptr},
      static_cast<cudaStream_t>(call.stream));
}

// 0, or 1 with the message in last_error: no exception may leave a C function.
template <class Work>
int guarded(Work const& work) {
  try {
    work();
    return 0;
  } catch (std::exception const& error) {
    last_error = error.what();
    return 1;
  }
}

}  // namespace

FwdEntry const& find_fwd(Problem const&) { return *fwd_row; }
BwdEntry const& find_bwd(Problem const&) { return *bwd_row; }

}  // namespace flash3

// The interface; library.py lets the linker hide every other name.
extern "C" {

int flash3_builds_interface() { return flash3::kInterface; }

char const* flash3_builds_error() { return flash3::last_error.c_str(); }

int flash3_builds_count(Flash3Pass pass) {
  return static_cast<int>(pass == Flash3Pass::kForward ? flash3::fwd_table().size()
                                                       : flash3::bwd_table().size());
}

int flash3_builds_row(Flash3Pass pass, int index, Flash3Row* row) {
  return flash3::guarded([&] {
    *row = pass == Flash3Pass::kForward ? flash3::describe(flash3::at(flash3::fwd_table(), index))
                                        : flash3::describe(flash3::at(flash3::bwd_table(), index));
  });
}

int flash3_builds_workspace(Flash3Pass pass, Flash3Call const* call, std::size_t* bytes) {
  return flash3::guarded([&] {
    *bytes = pass == Flash3Pass::kForward ? flash3::make_fwd_plan(*call).workspace_bytes
                                          : flash3::make_bwd_plan(*call).workspace_bytes;
  });
}

int flash3_builds_launch(Flash3Pass pass, Flash3Call const* call) {
  return flash3::guarded([&] {
    pass == Flash3Pass::kForward ? flash3::launch_forward(*call) : flash3::launch_backward(*call);
  });
}

}  // extern "C"
