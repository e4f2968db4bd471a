// The words that stand for enumerators in row names, messages and the Python interface.
#pragma once

#include "params.h"

namespace flash3 {

constexpr char const* word(DType dtype) {
  return dtype == DType::kF16 ? "f16" : dtype == DType::kBF16 ? "bf16" : "e4m3";
}
constexpr char const* word(MaskKind mask) {
  switch (mask) {
    case MaskKind::kFull:
      return "full";
    case MaskKind::kCausal:
      return "causal";
    default:
      return "local";
  }
}
constexpr char const* word(SeqLayout layout) {
  return layout == SeqLayout::kDense ? "dense" : "packed";
}

}  // namespace flash3
