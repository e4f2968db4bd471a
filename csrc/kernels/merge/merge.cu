// The merge of partial results: memory-bound, one pass over both parts.
#include "merge.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>
#include <stdexcept>

#include "cuda_check.h"

namespace flash3 {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // elements that a thread handles

struct Vector {
  float x[kVector];
};

__device__ Vector load(float const* from) {
  float4 const low = reinterpret_cast<float4 const*>(from)[0];
  float4 const high = reinterpret_cast<float4 const*>(from)[1];
  return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}

template <class Half>
__device__ Vector load(Half const* from) {
  struct alignas(16) Packed {
    Half x[kVector];
  } const packed = *reinterpret_cast<Packed const*>(from);
  Vector vector;
#pragma unroll
  for (int i = 0; i < kVector; ++i) vector.x[i] = static_cast<float>(packed.x[i]);
  return vector;
}

__device__ void store(float* to, Vector const& v) {
  reinterpret_cast<float4*>(to)[0] = make_float4(v.x[0], v.x[1], v.x[2], v.x[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(v.x[4], v.x[5], v.x[6], v.x[7]);
}

template <class Half>
__device__ void store(Half* to, Vector const& v) {
  struct alignas(16) Packed {
    Half x[kVector];
  } packed;
#pragma unroll
  for (int i = 0; i < kVector; ++i) packed.x[i] = static_cast<Half>(v.x[i]);
  *reinterpret_cast<Packed*>(to) = packed;
}

struct Row {
  int64_t batch;
  int64_t position;
  int head;
};

template <class Element>
__device__ Element* address(TensorView const& view, Row const& row, int column) {
  return static_cast<Element*>(view.ptr) + row.batch * view.batch_stride +
         row.position * view.seqlen_stride + row.head * view.head_stride + column;
}

__device__ float* address(RowsView const& view, Row const& row) {
  return view.ptr + row.batch * view.batch_stride + row.head * view.head_stride + row.position;
}

// head_dim / 8 neighbouring threads share a row, and a row lies within a block: all of them have
// read its lse before one of them writes the new one, perhaps in the same place.
template <class Out, class First, class Second>
__global__ void __launch_bounds__(kThreads) merge_kernel(MergeParams const p) {
  int const threads_per_row = p.head_dim / kVector;
  int const rows_per_block = kThreads / threads_per_row;
  int const row_in_block = threadIdx.x / threads_per_row;
  int const column = threadIdx.x % threads_per_row * kVector;
  int64_t const index = int64_t(blockIdx.x) * rows_per_block + row_in_block;
  bool const active =
      row_in_block < rows_per_block && index < int64_t(p.batch) * p.seqlen * p.heads;
  Row row{};
  float lse_1 = -INFINITY, lse_2 = -INFINITY;
  if (active) {
    row.head = int(index % p.heads);
    row.position = index / p.heads % p.seqlen;
    row.batch = index / p.heads / p.seqlen;
    lse_1 = *address(p.lse_1, row);
    lse_2 = *address(p.lse_2, row);
  }
  __syncthreads();
  if (!active) return;

  float const largest = fmaxf(lse_1, lse_2);
  float const shift = largest == -INFINITY ? 0.f : largest;  // a row that no key is for
  float const sum_1 = expf(lse_1 - shift), sum_2 = expf(lse_2 - shift);
  float const sum = sum_1 + sum_2;
  float const inverse = sum == 0.f ? 0.f : 1.f / sum;
  float const weight_1 = sum_1 * inverse, weight_2 = sum_2 * inverse;

  Vector const a = load(address<First const>(p.out_1, row, column));
  Vector const b = load(address<Second const>(p.out_2, row, column));
  Vector merged;
#pragma unroll
  for (int i = 0; i < kVector; ++i) merged.x[i] = weight_1 * a.x[i] + weight_2 * b.x[i];
  store(address<Out>(p.out, row, column), merged);
  if (column == 0) *address(p.lse, row) = largest == -INFINITY ? -INFINITY : shift + logf(sum);
}

template <class Out, class First, class Half>
void launch(MergeParams const& p, cudaStream_t stream) {
  int const rows_per_block = kThreads / (p.head_dim / kVector);
  int64_t const rows = int64_t(p.batch) * p.seqlen * p.heads;
  int64_t const blocks = (rows + rows_per_block - 1) / rows_per_block;
  if (blocks > std::numeric_limits<int>::max()) {
    throw std::runtime_error("flash3: merge of more than 2^31 blocks of rows");
  }
  merge_kernel<Out, First, Half><<<unsigned(blocks), kThreads, 0, stream>>>(p);
  FLASH3_CUDA_CHECK(cudaGetLastError());
}

template <class Half>
void launch_for(MergeParams const& p, cudaStream_t stream) {
  if (p.out_is_fp32) {
    p.first_is_fp32 ? launch<float, float, Half>(p, stream) : launch<float, Half, Half>(p, stream);
  } else {
    p.first_is_fp32 ? launch<Half, float, Half>(p, stream) : launch<Half, Half, Half>(p, stream);
  }
}

}  // namespace

void launch_merge(MergeParams const& p, cudaStream_t stream) {
  p.dtype == DType::kF16 ? launch_for<__half>(p, stream) : launch_for<__nv_bfloat16>(p, stream);
}

}  // namespace flash3
