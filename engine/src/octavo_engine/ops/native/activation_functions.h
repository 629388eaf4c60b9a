// The activations that kernels compute; `ops/activation.py` uses the same numbers.
#pragma once

#include "vectors.h"

namespace {

enum Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

inline Vec sigmoid(Vec x) {
  Vec e = exp_vec(x < 0.0f ? x : -x);  // exp(-|x|) never overflows
  return (x < 0.0f ? e : splat(1.0f)) / (e + 1.0f);
}

inline Vec silu(Vec x) { return x * sigmoid(x); }

// x (1 + tanh(y)) / 2 = x sigmoid(2 y), without the cancellation where tanh is near -1.
inline Vec gelu_tanh(Vec x) { return x * sigmoid((x + x * x * x * 0.044715f) * (2 * 0.7978845608f)); }

inline Vec activate(Vec x, int32_t activation) { return activation == kSilu ? silu(x) : gelu_tanh(x); }

// Rounds to T after the activation and after the product, as separate operations on T do.
template <typename T>
Vec rounded(Vec x);
template <>
inline Vec rounded<float>(Vec x) {
  return x;
}
template <>
inline Vec rounded<BFloat16>(Vec x) {
  BitVec bits = *reinterpret_cast<BitVec*>(&x);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
  return x == x ? *reinterpret_cast<Vec*>(&bits) : x;
}
template <typename T>
Vec gated(Vec gate, Vec up, int32_t activation) {
  return rounded<T>(activate(rounded<T>(gate), activation)) * rounded<T>(up);
}

}  // namespace
