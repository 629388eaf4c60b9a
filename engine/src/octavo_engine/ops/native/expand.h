// Reads the quants and the numbers of blocks, and expands blocks to bf16 for rows of a table of embeddings.
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

// Products of two unsigned quants of 8 bits overflow the 16 bits of AVX2, so quants of 8 bits are signed there.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
constexpr bool kSigned8Bits = true;
#else
constexpr bool kSigned8Bits = false;
#endif

// The quants of word j as bytes: `first` of inputs 4j to 4j + 3 and, of less than 8 bits, `second` of 16 inputs later.
struct Quants { BitVec first, second; };

template <Format f>
Quants quants_at(const uint8_t* words, int j) {
  auto load = [](const uint8_t* p) { return *reinterpret_cast<const BitVec*>(p); };
  const BitVec word = load(words + j * 4 * kUnit);
  if (low_bits(f) == 8) return {kSigned8Bits ? word ^ 0x80808080u : word, BitVec{}};
  Quants q = {word & 0x0f0f0f0fu, word >> 4 & 0x0f0f0f0fu};
  if (high_bits(f) == 0) return q;
  constexpr int kHigh = high_bits(f);
  constexpr uint32_t kMask = kHigh == 2 ? 0x30303030u : 0x10101010u;
  const BitVec high = load(words + (4 + kHigh * j / 4) * 4 * kUnit) >> (kHigh * j % 4);
  return {q.first | (high << 4 & kMask), q.second | (high & kMask)};
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
  Vec normal = (Vec)((size << 13) + (112u << 23));
  Vec subnormal = __builtin_convertvector(IntVec(size), Vec) * 0x1p-24f;
  Vec value = size < 0x400u ? subnormal : normal;
  return (Vec)((BitVec)value | (bits & 0x8000u) << 16);
}

// The numbers of a step for kLanes outputs: the scales of both halves, which differ in Q6_K only, and the minimum.
struct StepNumbers { Vec scale[2], minimum; };

// numbers: of the step; factor, least: of K types, those of the group.
template <Format f>
StepNumbers step_numbers(const uint8_t* numbers, int output, Vec factor, Vec least) {
  const uint8_t* at = numbers + (is_k_type(f) ? 1 : 2) * output;
  if (!is_k_type(f)) return {{load_fp16(at), Vec{}}, has_minima(f) ? load_fp16(at + 2 * kPanel) : Vec{}};
  if (has_minima(f)) return {{factor * load_bytes<uint8_t>(at), Vec{}}, least * load_bytes<uint8_t>(at + kPanel)};
  return {{factor * load_bytes<int8_t>(at), factor * load_bytes<int8_t>(at + kPanel)}, Vec{}};
}

// Expands a step of one output, the `lane` of its panel.
template <Format f>
void expand_step(const uint8_t* weight, int64_t step, int lane, BFloat16* to) {
  constexpr int kHigh = high_bits(f), kMiddle = has_minima(f) ? 0 : 1 << (low_bits(f) + kHigh - 1);
  const uint8_t* from = weight + step_offset(f, step);
  const uint8_t* words = from + lane / kUnit * kUnit * quant_bytes(f) + lane % kUnit * 4;
  const uint8_t* factors = weight + step_offset(f, step / kGroupSteps * kGroupSteps) - kPanel * factor_bytes(f);
  const int first = lane / kLanes * kLanes;
  const Vec least = has_minima(f) ? -load_fp16(factors + 2 * kPanel + 2 * first) : Vec{};
  const StepNumbers n = step_numbers<f>(from + kPanel * quant_bytes(f), first, load_fp16(factors + 2 * first), least);
  for (int i = 0; i < kStep; i++) {
    const int word = low_bits(f) == 8 ? i / 4 : i % 16 / 4, shift = low_bits(f) == 8 ? 0 : i / 16 * 4;
    int quant = words[word * 4 * kUnit + i % 4] >> shift & ((1 << low_bits(f)) - 1);
    if (kHigh) {
      const int bits = words[(4 + kHigh * word / 4) * 4 * kUnit + i % 4] >> (shift + kHigh * word % 4);
      quant |= (bits & ((1 << kHigh) - 1)) << 4;
    }
    const float scale = n.scale[f == kQ6_K ? i / 16 : 0][lane - first];
    from_float(scale * float(quant - kMiddle) + n.minimum[lane - first], to + i);
  }
}

constexpr void (*kExpandStep[])(const uint8_t* weight, int64_t step, int lane, BFloat16* to) = {
    nullptr,            expand_step<kQ8_0>, expand_step<kQ4_0>, expand_step<kQ4_1>, expand_step<kQ5_0>,
    expand_step<kQ5_1>, expand_step<kQ4_K>, expand_step<kQ5_K>, expand_step<kQ6_K>};

}  // namespace
