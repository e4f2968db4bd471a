// Constants of the log2 domain, in which both passes work (docs/numerics.md).
#pragma once

namespace flash3 {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

}  // namespace flash3
