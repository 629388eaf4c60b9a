// Sums of products of 16 numbers, a unit, by a factor, for linear layers and attention: in bf16 two products at a time.
//
// Numerics. A pair of bf16 adds the product of the odd element, then that of the even one, each exact and rounded once
// with the sum (fused), as vdpbf16ps does, which also takes denormals as zero. CPUs without fused operations round
// products of fp32, too; those of bf16 are exact.
#pragma once

#include "vectors.h"
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int kUnit = 16;

// The sums of one unit, and a pair of factors, which `factor` reads from two elements. `store_elements` rounds to bf16.
#if defined(__AVX512BF16__)
using Factor = uint32_t;
struct PairSums {
  using Element = BFloat16;
  static Factor factor(const Element* elements) {
    Factor pair;
    std::memcpy(&pair, elements, sizeof pair);
    return pair;
  }
  static void store_elements(Element* to, Vec x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)x));
  }
  __m512 sum = _mm512_setzero_ps();
  void add(const void* unit, Factor pair) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(unit), (__m512bh)_mm512_set1_epi32(int(pair)));
  }
  void save(float* out) const { _mm512_storeu_ps(out, sum); }
};
#else
struct Factor {
  float even, odd;
};
struct PairSums {
  using Element = float;
  static Factor factor(const Element* elements) { return {elements[0], elements[1]}; }
  static void store_elements(Element* to, Vec x) {
    BFloat16 rounded[kLanes];
    store(rounded, x);
    store(to, load(rounded));
  }
  Vec sum[kUnit / kLanes] = {};
  void add(const void* unit, Factor pair) {
    for (int i = 0; i < kUnit / kLanes; i++) {
      const BitVec bits = static_cast<const BitVec*>(unit)[i];
      sum[i] += (Vec)(bits & 0xffff0000u) * pair.odd;
      sum[i] += (Vec)(bits << 16) * pair.even;
    }
  }
  void save(float* out) const {
    for (int i = 0; i < kUnit / kLanes; i++) store(out + kLanes * i, sum[i]);
  }
};
#endif

// The same of fp32, one product at a time.
struct FloatSums {
  using Element = float;
  static float factor(const Element* element) { return *element; }
  static void store_elements(Element* to, Vec x) { store(to, x); }
  Vec sum[kUnit / kLanes] = {};
  void add(const float* unit, float factor) {
    for (int i = 0; i < kUnit / kLanes; i++) sum[i] += load(unit + kLanes * i) * factor;
  }
  void save(float* out) const {
    for (int i = 0; i < kUnit / kLanes; i++) store(out + kLanes * i, sum[i]);
  }
};

}  // namespace
