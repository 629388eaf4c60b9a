// Reads the numbers of blocks, and expands blocks to bf16 for rows of a table of embeddings.
//
// Numerics. A value is scale * quant + minimum in fp32, rounded to bf16. All products are exact in fp32: an fp16 number has
// 11 bits, a byte of a K type 6 (Q6_K: 7), a quant at most 5 (Q6_K: 6, Q8_0: 8). So the fp32 sum has one rounding, with and
// without fused multiply-adds, and equals that of the `gguf` library. Scales and minima are finite.
#pragma once

#include "panels.h"
#if defined(__AVX2__)
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

template <typename Byte>
Vec load_bytes(const uint8_t* p) {  // the compiler's own conversion of bytes takes three times as long
  constexpr bool kIsSigned = Byte(-1) < 0;
#if defined(__AVX512F__)
  const __m128i packed = _mm_loadu_si128((const __m128i*)p);
  return (Vec)_mm512_cvtepi32_ps(kIsSigned ? _mm512_cvtepi8_epi32(packed) : _mm512_cvtepu8_epi32(packed));
#elif defined(__AVX2__)
  const __m128i packed = _mm_loadl_epi64((const __m128i*)p);
  return (Vec)_mm256_cvtepi32_ps(kIsSigned ? _mm256_cvtepi8_epi32(packed) : _mm256_cvtepu8_epi32(packed));
#endif
  typedef Byte Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, IntVec), Vec);
}

inline Vec load_fp16(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#endif
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
  BitVec e, o;
  std::memcpy(&e, &even, sizeof e);
  std::memcpy(&o, &odd, sizeof o);
  const PairVec upper = alternate(e >> 16, o), lower = alternate(e, o << 16);
  // Adds 1, by subtracting -1, if more than half is cut off, or half and the kept part is odd.
  const PairVec pairs = upper - ((lower ^ int16_t(-0x8000)) > -(upper & int16_t(1)));
  std::memcpy(to, &pairs, sizeof pairs);
}

// The scales and minima of a block: of quants 0 to 15 and of quants 16 to 31.
struct Numbers {
  Vec scale[2], minimum[2];
};

template <Format f>
Numbers numbers_of(const uint8_t* numbers, const uint8_t* factors) {
  constexpr float kHalf = float(1 << (low_bits(f) + high_bits(f) - 1));
  if (!is_k_type(f)) {
    const Vec scale = load_fp16(numbers), minimum = has_minima(f) ? load_fp16(numbers + 2 * kPanel) : scale * -kHalf;
    return {{scale, scale}, {minimum, minimum}};
  }
  const Vec factor = load_fp16(factors);
  if (has_minima(f)) {
    const Vec scale = factor * load_bytes<uint8_t>(numbers);
    const Vec minimum = load_fp16(factors + 2 * kPanel) * -load_bytes<uint8_t>(numbers + kPanel);
    return {{scale, scale}, {minimum, minimum}};
  }
  const Vec first = factor * load_bytes<int8_t>(numbers), second = factor * load_bytes<int8_t>(numbers + kPanel);
  return {{first, second}, {first * -kHalf, second * -kHalf}};
}

// Expands a step for kLanes outputs from `output` of the panel; to: the first of these outputs, pairs 2 * kUnit apart.
template <Format f>
void expand_lanes(const uint8_t* weight, int64_t step, int output, uint16_t* to) {
  constexpr int kBits = low_bits(f), kPerWord = 32 / kBits, kWords = kStep / kPerWord, kHigh = high_bits(f);
  constexpr int kNumber = is_k_type(f) ? 1 : 2;
  const uint8_t* from = weight + step_offset(f, step);
  const uint8_t* factors = weight + step_offset(f, step / kGroupSteps * kGroupSteps) - kPanel * factor_bytes(f);
  const uint8_t* words = from + output / kUnit * kUnit * quant_bytes(f) + output % kUnit * 4;
  const Numbers n = numbers_of<f>(from + kPanel * quant_bytes(f) + kNumber * output, factors + 2 * output);
  // A quant is used where it is in its word, so as a multiple of a power of two; only the top one would have a sign.
  constexpr int kTop = kPerWord - 1, kHalves = kBits == 4 ? 2 : 1;
  Vec scales[kPerWord];
  for (int i = 0; i < kTop; i++) scales[i] = n.scale[i % kHalves] * (1.0f / float(1 << (kBits * i)));
  scales[kTop] = n.scale[kTop % kHalves];
#pragma GCC unroll 8
  for (int j = 0; j < kWords; j++) {
    const BitVec word = load_words(words + j * 4 * kUnit);
    const int shift = kHigh * j % 4;
    BitVec high = {};
    if (kHigh) high = load_words(words + (kWords + kHigh * j / 4) * 4 * kUnit) >> shift;
    auto value = [&](int i) {
      BitVec quant = i == kTop ? word >> (32 - kBits) : word & ((1u << kBits) - 1) << (kBits * i);
      const uint32_t mask = (1u << kHigh) - 1;
      if (kHigh) quant |= i == kTop ? high >> 24 & mask << 4 : high << 4 & mask << (4 * i + 4);
      return __builtin_convertvector(IntVec(quant), Vec) * scales[i] + n.minimum[i % kHalves];
    };
#pragma GCC unroll 4
    for (int i = 0; i < 16 / kBits; i++) {  // pairs: bytes 0 and 1, bytes 2 and 3; of 4 bits, low halves before high
      int half = i / 2, second = i % 2, first = (4 * half + 16 * second) / kBits;
      store_pairs(to + (8 * half + 2 * j + second) * 2 * kUnit, value(first), value(first + 8 / kBits));
    }
  }
}

using ExpandLanes = void (*)(const uint8_t* weight, int64_t step, int output, uint16_t* to);
constexpr ExpandLanes kExpanders[] = {nullptr,
                                      expand_lanes<kQ8_0>,
                                      expand_lanes<kQ4_0>,
                                      expand_lanes<kQ4_1>,
                                      expand_lanes<kQ5_0>,
                                      expand_lanes<kQ5_1>,
                                      expand_lanes<kQ4_K>,
                                      expand_lanes<kQ5_K>,
                                      expand_lanes<kQ6_K>};

}  // namespace
