// Expands steps of blocks to bf16, in the layout that the linear kernels multiply.
//
// Numerics. A value is scale * quant + minimum, rounded once to bf16: products of a quant and an fp16 scale are exact in
// fp32, so the fp32 sum has one rounding with and without fused multiply-adds. Scales and minima are finite.
#pragma once

#include "panels.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

inline Vec float_vec(BitVec bits) {
  Vec value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline BitVec load_words(const uint8_t* p) {
  BitVec words;
  std::memcpy(&words, p, sizeof words);
  return words;
}

inline Vec load_fp16(const uint8_t* p) {
  BitVec bits = __builtin_convertvector(*reinterpret_cast<const HalfVec*>(p), BitVec), size = bits & 0x7fffu;
  Vec normal = float_vec((size << 13) + (112u << 23));
  Vec subnormal = __builtin_convertvector(IntVec(size), Vec) * 0x1p-24f;
  Vec value = size < 0x400u ? subnormal : normal;
  BitVec result;
  std::memcpy(&result, &value, sizeof result);
  return float_vec(result | (bits & 0x8000u) << 16);
}

// The quant whose lowest bit is bit `shift` of each word.
template <Format f>
Vec quants(BitVec words, int shift) {
  if (f == kQ8_0) return __builtin_convertvector(IntVec(words << (24 - shift)) >> 24, Vec);
#if defined(__AVX512F__)
  static const Vec numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return (Vec)_mm512_permutexvar_ps((__m512i)(words >> shift), (__m512)numbers);  // uses the low 4 bits of an index
#else
  return __builtin_convertvector(IntVec(words >> shift & 15u), Vec);
#endif
}

inline BitVec rounded(Vec x) {  // to bf16 in the upper half of each lane: to nearest, ties to even
  BitVec bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits + 0x7fffu + (bits >> 16 & 1u);
}

inline void store_pairs(uint16_t* to, Vec even, Vec odd) {
#if defined(__AVX512BF16__)
  alignas(64) static const uint16_t alternate[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(alternate), halves));
#else
  BitVec pairs = rounded(even) >> 16 | (rounded(odd) & 0xffff0000u);
  std::memcpy(to, &pairs, sizeof pairs);
#endif
}

// Expands a step for kLanes outputs from `output` of the panel; to: the first of these outputs, pairs 2 * kUnit apart.
template <Format f>
void expand_lanes(const uint8_t* step, int output, uint16_t* to) {
  constexpr int kBits = f == kQ8_0 ? 8 : 4, kScales = kPanel * quant_bytes(f);
  const uint8_t* words = step + output / kUnit * kUnit * quant_bytes(f) + output % kUnit * 4;
  const Vec scale = load_fp16(step + kScales + 2 * output);
  const Vec minimum = f == kQ4_1   ? load_fp16(step + kScales + 2 * (kPanel + output))
                      : f == kQ4_0 ? scale * -8.0f
                                   : Vec{};
#pragma GCC unroll 8
  for (int j = 0; j < quant_bytes(f) / 4; j++, words += 4 * kUnit) {
    BitVec word = load_words(words);
    for (int i = 0; i < 16 / kBits; i++) {  // pairs: bytes 0 and 1, bytes 2 and 3; of 4 bits, low halves before high
      int half = i / 2, second = i % 2, shift = 4 * half + 16 * second;
      store_pairs(to + (8 * half + 2 * j + second) * 2 * kUnit, quants<f>(word, shift) * scale + minimum,
                  quants<f>(word, shift + 8) * scale + minimum);
    }
  }
}

using ExpandLanes = void (*)(const uint8_t*, int, uint16_t*);
inline ExpandLanes expand_lanes_of(Format f) {
  return f == kQ8_0 ? expand_lanes<kQ8_0> : f == kQ4_0 ? expand_lanes<kQ4_0> : expand_lanes<kQ4_1>;
}

template <Format f>
void expand_steps(const uint8_t* from, int64_t count, uint16_t* to) {
  for (int64_t s = 0; s < count; s++, from += kPanel * block_bytes(f), to += kStepElements)
    for (int output = 0; output < kPanel; output += kLanes)
      expand_lanes<f>(from, output, to + output / kUnit * kUnitElements + output % kUnit * 2);
}

// Returns steps [begin, end) of a panel in bf16: where they are, or expanded into `scratch`.
inline const uint16_t* bf16_steps(const Linear& l, int64_t panel, int64_t begin, int64_t end, uint16_t* scratch) {
  const uint8_t* from = step_of(l, panel, begin);
  if (l.format == kBFloat16) return reinterpret_cast<const uint16_t*>(from);
  auto expand = l.format == kQ8_0 ? expand_steps<kQ8_0> : l.format == kQ4_0 ? expand_steps<kQ4_0> : expand_steps<kQ4_1>;
  expand(from, end - begin, scratch);
  return scratch;
}

}  // namespace
