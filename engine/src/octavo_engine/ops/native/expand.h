// Expands steps of blocks to bf16, in the layout that the linear kernels multiply.
//
// Numerics. A value is scale * quant + minimum, rounded once to bf16: products of a quant and an fp16 scale are exact in
// fp32, so the fp32 sum has one rounding with and without fused multiply-adds. Scales and minima are finite.
#pragma once

#include "panels.h"
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

inline Vec float_vec(BitVec bits) {
  Vec value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Lanes of 16 bits: those of even numbers of `even`, those of odd numbers of `odd`.
typedef int16_t PairVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
inline PairVec alternate(BitVec even, BitVec odd) {
  PairVec choice;
  for (int i = 0; i < 2 * kLanes; i++) choice[i] = int16_t(i % 2 ? 2 * kLanes + i : i);
  return __builtin_shuffle((PairVec)even, (PairVec)odd, choice);
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

// Stores pairs of bf16, rounded to nearest, ties to even; the upper half of a lane is `odd`.
inline void store_pairs(uint16_t* to, Vec even, Vec odd) {
#if defined(__AVX512BF16__)
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(order), halves));
#else
  BitVec e, o;
  std::memcpy(&e, &even, sizeof e);
  std::memcpy(&o, &odd, sizeof o);
  const PairVec upper = alternate(e >> 16, o), lower = alternate(e, o << 16);
  // Adds 1, by subtracting -1, if more than half is cut off, or half and the kept part is odd.
  const PairVec pairs = upper - ((lower ^ int16_t(-0x8000)) > -(upper & int16_t(1)));
  std::memcpy(to, &pairs, sizeof pairs);
#endif
}

// Expands a step for kLanes outputs from `output` of the panel; to: the first of these outputs, pairs 2 * kUnit apart.
template <Format f>
void expand_lanes(const uint8_t* step, int output, uint16_t* to) {
  constexpr int kBits = f == kQ8_0 ? 8 : 4, kPerWord = 32 / kBits, kScales = kPanel * quant_bytes(f);
  const uint8_t* words = step + output / kUnit * kUnit * quant_bytes(f) + output % kUnit * 4;
  const Vec scale = load_fp16(step + kScales + 2 * output);
  const Vec minimum = f == kQ4_1 ? load_fp16(step + kScales + 2 * (kPanel + output)) : scale * -float(1 << (kBits - 1));
  // A quant is used where it is in its word, so as a multiple of a power of two; only the top one would have a sign.
  Vec scales[kPerWord];
  for (int i = 0; i < kPerWord - 1; i++) scales[i] = scale * (1.0f / float(1 << (kBits * i)));
  scales[kPerWord - 1] = scale;
  auto value = [&](BitVec word, int i) {
    BitVec quant = i == kPerWord - 1 ? word >> (32 - kBits) : word & ((1u << kBits) - 1) << (kBits * i);
    return __builtin_convertvector(IntVec(quant), Vec) * scales[i] + minimum;
  };
  for (int j = 0; j < quant_bytes(f) / 4; j++, words += 4 * kUnit) {
    BitVec word = load_words(words);
    for (int i = 0; i < 16 / kBits; i++) {  // pairs: bytes 0 and 1, bytes 2 and 3; of 4 bits, low halves before high
      int half = i / 2, second = i % 2, first = (4 * half + 16 * second) / kBits;
      store_pairs(to + (8 * half + 2 * j + second) * 2 * kUnit, value(word, first), value(word, first + 8 / kBits));
    }
  }
}

using ExpandLanes = void (*)(const uint8_t*, int, uint16_t*);
inline ExpandLanes expand_lanes_of(Format f) {
  return f == kQ8_0 ? expand_lanes<kQ8_0> : f == kQ4_0 ? expand_lanes<kQ4_0> : expand_lanes<kQ4_1>;
}

// `ahead`: steps that are read later, of which as many are prefetched.
template <Format f>
void expand_steps(const uint8_t* from, int64_t count, uint16_t* to, const uint8_t* ahead) {
  constexpr int kBytes = kPanel * block_bytes(f);
  for (int64_t s = 0; s < count; s++, from += kBytes, ahead += kBytes, to += kStepElements) {
    for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(ahead + i, 0, 3);
    for (int output = 0; output < kPanel; output += kLanes)
      expand_lanes<f>(from, output, to + output / kUnit * kUnitElements + output % kUnit * 2);
  }
}

// Returns steps [begin, end) of a panel in bf16: where they are, or expanded into `scratch`. Blocks `steps_ahead` steps
// after these are prefetched; after a panel's last step comes the panel that is `panels_ahead` after it.
inline const uint16_t* bf16_steps(const Linear& l, int64_t panel, int64_t begin, int64_t end, uint16_t* scratch,
                                  int64_t steps_ahead, int64_t panels_ahead) {
  const uint8_t* from = step_of(l, panel, begin);
  if (l.format == kBFloat16) return reinterpret_cast<const uint16_t*>(from);
  const int64_t next = begin + steps_ahead, steps = steps_of(l);
  const uint8_t* ahead = next < steps ? step_of(l, panel, next) : step_of(l, panel + panels_ahead, next - steps);
  auto expand = l.format == kQ8_0 ? expand_steps<kQ8_0> : l.format == kQ4_0 ? expand_steps<kQ4_0> : expand_steps<kQ4_1>;
  expand(from, end - begin, scratch, ahead);
  return scratch;
}

}  // namespace
