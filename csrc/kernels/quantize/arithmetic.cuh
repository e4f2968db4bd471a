// float32 arithmetic of the quantiser: IEEE, subnormals included. The kernels are compiled with
// --use_fast_math, which would take subnormal numbers, all of a tensor of tiny values, for zero.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flash3 {

__device__ inline float add(float a, float b) {
  float sum;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}

__device__ inline float subtract(float a, float b) {
  float difference;
  asm("sub.rn.f32 %0, %1, %2;" : "=f"(difference) : "f"(a), "f"(b));
  return difference;
}

__device__ inline float multiply(float a, float b) {
  float product;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

__device__ inline float multiply_add(float a, float b, float c) {
  float sum;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(a), "f"(b), "f"(c));
  return sum;
}

// max(a, |b|); a where b is NaN.
__device__ inline float max_abs(float a, float b) {
  float largest;
  asm("{\n"
      ".reg .f32 magnitude;\n"
      "abs.f32 magnitude, %2;\n"
      "max.f32 %0, %1, magnitude;\n"
      "}"
      : "=f"(largest)
      : "f"(a), "f"(b));
  return largest;
}

__device__ inline bool is_finite(float x) {
  return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}

// Four numbers of at most 448, or NaN, as e4m3; the first in the lowest byte.
__device__ inline uint32_t to_e4m3(float a, float b, float c, float d) {
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return uint32_t(low) | uint32_t(high) << 16;
}

// 16 bytes to shared memory, behind the thread's back; zeros if `exists` is false, and then the
// address is not read.
__device__ inline void copy_async(uint4* to, void const* from, bool exists) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(unsigned(__cvta_generic_to_shared(to))),
      "l"(from), "r"(exists ? 16 : 0)
      : "memory");
}

// Eight neighbouring elements.
struct Chunk {
  float x[8];
};

template <class Half>
__device__ Chunk unpack(uint4 const& packed) {
  struct alignas(16) Halves {
    Half x[8];
  } const halves = *reinterpret_cast<Halves const*>(&packed);
  Chunk chunk;
#pragma unroll
  for (int i = 0; i < 8; ++i) chunk.x[i] = static_cast<float>(halves.x[i]);
  return chunk;
}

struct Four {
  float x[4];
};

template <class Half>
__device__ Four load_four(Half const* from) {
  struct alignas(8) Halves {
    Half x[4];
  } const halves = *reinterpret_cast<Halves const*>(from);
  return {{static_cast<float>(halves.x[0]), static_cast<float>(halves.x[1]),
           static_cast<float>(halves.x[2]), static_cast<float>(halves.x[3])}};
}

template <>
__device__ inline Four load_four(float const* from) {
  float4 const four = *reinterpret_cast<float4 const*>(from);
  return {{four.x, four.y, four.z, four.w}};
}

}  // namespace flash3
