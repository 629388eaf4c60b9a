// Linear layers over weights in blocks, for any number of rows, by products of integers.
//
// Numerics. The inputs of a row are rounded once, a step of 32 at a time, to int8 times scale = most / 127, where most is
// the largest size of an input: int8 = round(input * (127 / most)), ties to even, so never -128. If most is below 2^-100,
// scale and int8 are 0; if an input is infinite or NaN, scale is NaN and int8 are 0, so that all outputs of the row are
// NaN. The products of a block are summed in int32, which is exact in any order; quants that have no minimum are signed.
// An output is one chain from 0 of fused multiply-adds in fp32, over the steps in order:
// sum += float(block) * (block scale * scale), of Q6_K once for each half of the step, then, of a format with minima,
// sum += float(sum of the int8) * (minimum * scale). So an output's bits depend neither on other rows nor on the CPU's
// level, but CPUs without fused operations round products, too.
#pragma once

#include <omp.h>
#include <array>
#include <utility>

#include "buffer.h"
#include "expand.h"
#include "tiles.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

// The rows and the vectors of outputs whose products are summed together, in registers or, for a tile of rows, in tiles.
constexpr int kMostRows = kLanes == 4 ? 2 : 6, kVectors = kPanel / kLanes;
constexpr int kTogether = kLanes == 16 || kTileRows ? kVectors : 1;
constexpr int kBytesAhead = 6528;  // of 8-bit formats, are prefetched; the CPU foresees the reads of the others by itself
constexpr int64_t kBlockRows = 64 * 6;  // whose rounded inputs are in memory at a time

// A step of a row. sums: of int8 0 to 15 and 16 to 31; total: of all.
struct RoundedStep {
  int8_t values[kStep];
  float scale, total;
  int32_t sums[2];
};

inline Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
  for (int i = 0; i < kLanes; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

inline RoundedStep rounded_step(const BFloat16* x) {
  int16_t most = 0;  // sizes of bf16 are in the order of their bits, and NaN is above infinity
  for (int i = 0; i < kStep; i++) most = std::max(most, int16_t(x[i].bits & 0x7fff));
  const float size = to_float(BFloat16{uint16_t(most)});
  RoundedStep step = {};
  if (most >= 0x7f80) step.scale = size - size;  // NaN
  if (most >= 0x7f80 || size < 0x1p-100f) return step;
  const Vec inverse = splat(127 / size), shift = splat(0x1.8p23f);  // rounds to an integer in the low bits
  int32_t values[kStep];
  for (int i = 0; i < kStep; i += kLanes) {
    const Vec shifted = fused(load(x + i), inverse, shift);
    std::memcpy(values + i, &shifted, sizeof shifted);
  }
  for (int i = 0; i < kStep; i++) step.values[i] = int8_t(values[i]);
  for (int i = 0; i < 16; i++) step.sums[0] += step.values[i];
  for (int i = 16; i < kStep; i++) step.sums[1] += step.values[i];
  step.scale = size / 127, step.total = float(step.sums[0] + step.sums[1]);
  return step;
}

// Adds to each lane the products of its four quants, bytes, and the four int8 in a lane of x.
template <Format f>
IntVec add_products(IntVec sum, BitVec quants, IntVec x) {
#if defined(__AVX512VNNI__)
  return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)quants, (__m512i)x);
#elif defined(__AVX512BW__)
  __m512i w = (__m512i)quants, v = (__m512i)x;
  if (low_bits(f) == 8) {
    v = _mm512_mask_sub_epi8(v, _mm512_movepi8_mask(w), _mm512_setzero_si512(), v);
    w = _mm512_abs_epi8(w);
  }
  return sum + (IntVec)_mm512_madd_epi16(_mm512_maddubs_epi16(w, v), _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  __m256i w = (__m256i)quants, v = (__m256i)x;
  if (low_bits(f) == 8) v = _mm256_sign_epi8(v, w), w = _mm256_abs_epi8(w);
  return sum + (IntVec)_mm256_madd_epi16(_mm256_maddubs_epi16(w, v), _mm256_set1_epi16(1));
#else
  for (int shift = 0; shift <= 8; shift += 8) {  // the even bytes, then the odd ones
    const PairVec w = (PairVec)(quants >> shift & 0x00ff00ffu), v = (PairVec)(x << (8 - shift)) >> 8;
#if defined(__SSE2__)
    sum += (IntVec)_mm_madd_epi16((__m128i)w, (__m128i)v);
#else
    const PairVec products = w * v;  // at most 255 * 127, which fits
    sum += ((IntVec)products << 16 >> 16) + ((IntVec)products >> 16);
#endif
  }
  return sum;
#endif
}

#ifdef OCTAVO_TILES
// Adds the products of a step, of Q6_K of half of it, to block[row][32] for a tile of rows.
template <Format f>
void add_by_tiles(const uint8_t* from, int part, const RoundedStep* x, int64_t steps, int32_t* block) {
  alignas(64) uint8_t bytes[2][8][4 * kUnit];  // of each unit
  for (int output = 0; low_bits(f) != 8 && output < kPanel; output += kLanes)
    for (int j = 0; j < 4; j++) {
      const int unit = output / kUnit, at = output % kUnit * 4;
      const Quants quants = quants_at<f>(from + unit * kUnit * quant_bytes(f) + at, j);
      if (f != kQ6_K || part == 0) std::memcpy(&bytes[unit][j][at], &quants.first, sizeof(BitVec));
      if (f != kQ6_K || part == 1) std::memcpy(&bytes[unit][j + 4][at], &quants.second, sizeof(BitVec));
    }
  tile_fence();
  const uint8_t* units = low_bits(f) == 8 ? from : bytes[0][4 * part];
  tile_load(4, x->values + 16 * part, steps * int64_t(sizeof(RoundedStep)));
  tile_load(0, block, 4 * kPanel);
  tile_load(6, units, 64);
  tile_byte_product(0, 4, 6);
  tile_load(1, block + kUnit, 4 * kPanel);
  tile_load(7, units + 8 * 64, 64);
  tile_byte_product(1, 4, 7);
  tile_store(0, block, 4 * kPanel);
  tile_store(1, block + kUnit, 4 * kPanel);
}
#endif

// Sums the integer products of a step, of Q6_K of half of it, for kTogether vectors of outputs from `output` of a panel.
// from: the step of the panel; x: the step of the first row, rows `steps` apart.
template <Format f, int Rows>
inline __attribute__((always_inline)) void sum_block(const uint8_t* from, int output, int part, const RoundedStep* x,
                                                     int64_t steps, IntVec (&block)[Rows][kTogether]) {
  constexpr bool kIsWhole = f != kQ6_K, kIsTile = Rows == kTileRows;
  constexpr bool kIsCentred = has_minima(f) || (f == kQ8_0 && kSigned8Bits && !kIsTile);
  constexpr int kWords = kStep * low_bits(f) / 32, kMiddle = kIsCentred ? 0 : 1 << (low_bits(f) + high_bits(f) - 1);
#pragma GCC unroll 6
  for (int r = 0; r < Rows; r++) {
    const int32_t* sums = x[r * steps].sums;
#pragma GCC unroll 2
    for (int u = 0; u < kTogether; u++) block[r][u] = IntVec{} - kMiddle * (kIsWhole ? sums[0] + sums[1] : sums[part]);
  }
#ifdef OCTAVO_TILES
  if (kIsTile) return add_by_tiles<f>(from, part, x, steps, reinterpret_cast<int32_t*>(block));
#endif
#pragma GCC unroll 8
  for (int j = 0; j < kWords; j++) {
    Quants quants[kTogether];
#pragma GCC unroll 2
    for (int u = 0; u < kTogether; u++) {
      const int at = output + u * kLanes;
      quants[u] = quants_at<f>(from + at / kUnit * kUnit * quant_bytes(f) + at % kUnit * 4, j);
    }
#pragma GCC unroll 6
    for (int r = 0; r < Rows; r++) {
      int32_t first, second;  // four inputs each
      std::memcpy(&first, x[r * steps].values + 4 * j, 4);
      std::memcpy(&second, x[r * steps].values + (4 * j + 16) % kStep, 4);
#pragma GCC unroll 2
      for (int u = 0; u < kTogether; u++) {
        IntVec& sum = block[r][u];
        if (kIsWhole || part == 0) sum = add_products<f>(sum, quants[u].first, IntVec{} + first);
        if (low_bits(f) != 8 && (kIsWhole || part == 1))
          sum = add_products<f>(sum, quants[u].second, IntVec{} + second);
      }
    }
  }
}

// Computes out[row][32] of a panel whose first step is `first`, for Rows rows of `steps` each.
template <Format f, int Rows>
void multiply_rows(const uint8_t* weight, int64_t first, int64_t steps, const RoundedStep* x, float* out) {
  Vec sums[Rows][kVectors] = {}, factor[kVectors] = {}, least[kVectors] = {};
  for (int64_t s = 0; s < steps; s++, x++) {
    const uint8_t *from = weight + step_offset(f, first + s), *factors = from - kPanel * factor_bytes(f);
    for (int v = 0; is_k_type(f) && s % kGroupSteps == 0 && v < kVectors; v++) {
      factor[v] = load_fp16(factors + 2 * v * kLanes);
      if (has_minima(f)) least[v] = -load_fp16(factors + 2 * kPanel + 2 * v * kLanes);
    }
    for (int i = 0; low_bits(f) == 8 && i < kPanel * block_bytes(f); i += 64)
      __builtin_prefetch(from + kBytesAhead + i, 0, 2);
    for (int v = 0; v < kVectors; v += kTogether) {
      StepNumbers numbers[kTogether];
#pragma GCC unroll 2
      for (int u = 0; u < kTogether; u++)
        numbers[u] = step_numbers<f>(from + kPanel * quant_bytes(f), (v + u) * kLanes, factor[v + u], least[v + u]);
#pragma GCC unroll 2
      for (int part = 0; part < (f == kQ6_K ? 2 : 1); part++) {
        alignas(64) IntVec block[Rows][kTogether];
        sum_block<f, Rows>(from, v * kLanes, part, x, steps, block);
#pragma GCC unroll 6
        for (int r = 0; r < Rows; r++)
#pragma GCC unroll 2
          for (int u = 0; u < kTogether; u++) {
            const RoundedStep& step = x[r * steps];
            Vec& sum = sums[r][v + u];
            sum = fused(__builtin_convertvector(block[r][u], Vec), numbers[u].scale[part] * step.scale, sum);
            if (has_minima(f)) sum = fused(splat(step.total), numbers[u].minimum * step.scale, sum);
          }
      }
    }
  }
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < kVectors; v++) store(out + r * kPanel + v * kLanes, sums[r][v]);
}

using MultiplyRows = void (*)(const uint8_t*, int64_t, int64_t, const RoundedStep*, float*);
template <Format f, int... less>
constexpr std::array<MultiplyRows, kMostRows> rows_table(std::integer_sequence<int, less...>) {
  return {multiply_rows<f, less + 1>...};
}

// Computes all rows of panels [first, last), some rows at a time over a panel that stays in the cache. If there are more rows
// than a tile has, whole tiles of rows are computed by tiles.
template <Format f>
void multiply_panels(const Linear& l, const Call& a, const RoundedStep* x, int64_t first, int64_t last) {
  constexpr auto kMultiply = rows_table<f>(std::make_integer_sequence<int, kMostRows>());
  alignas(64) float sums[std::max(kMostRows, kTileRows) * kPanel];
  const int64_t steps = steps_of(l);
  configure_tiles(kTileRows, kTileRows, f == kQ6_K ? kStep / 2 : kStep);
  for (int64_t p = first; p < last; p++)
    for (int64_t r = 0, rows; r < a.rows; r += rows) {
      rows = std::min<int64_t>(kMostRows, a.rows - r);
      MultiplyRows multiply = kMultiply[rows - 1];
      if constexpr (kTileRows > 0)
        if (a.rows > kTileRows && a.rows - r >= kTileRows) rows = kTileRows, multiply = multiply_rows<f, kTileRows>;
      multiply(l.weight, p * steps, steps, x + r * steps, sums);
      finish(l, a, p, r, int(rows), sums);
    }
  tile_release();  // for torch, as in `linear_tiles.h`
}

constexpr void (*kMultiplyPanels[])(const Linear&, const Call&, const RoundedStep*, int64_t, int64_t) = {
    nullptr,                multiply_panels<kQ8_0>, multiply_panels<kQ4_0>, multiply_panels<kQ4_1>, multiply_panels<kQ5_0>,
    multiply_panels<kQ5_1>, multiply_panels<kQ4_K>, multiply_panels<kQ5_K>, multiply_panels<kQ6_K>};

// Computes the `count` parts of a layer for up to kBlockRows rows. `rounded`: memory for the steps of the rows.
inline void multiply_chunk(const Linear* parts, int64_t count, const Call& a, RoundedStep* rounded) {
  const int64_t steps = steps_of(*parts);
#pragma omp parallel num_threads(a.num_threads) if (a.num_threads > 1)
  {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < a.rows; r++)
      for (int64_t s = 0; s < steps; s++) rounded[r * steps + s] = rounded_step(a.x + r * a.x_stride + s * kStep);
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    Call call = a;
    for (const Linear* l = parts; l < parts + count; call.out = next_part(call, *l++)) {
      const int64_t panels = panels_of(*l);
      kMultiplyPanels[l->format](*l, call, rounded, panels * thread / threads, panels * (thread + 1) / threads);
    }
  }
}

// Computes the `count` parts of a layer, all of them in blocks. `a`: the call of the first part.
inline void multiply_blocks(const Linear* parts, int64_t count, const Call& a) {
  static thread_local Buffer<RoundedStep> buffer;
  RoundedStep* rounded = buffer.reserve(size_t(std::min(a.rows, kBlockRows) * steps_of(*parts)));
  for (int64_t r = 0; r < a.rows; r += kBlockRows) multiply_chunk(parts, count, rows_of(a, r, kBlockRows), rounded);
}

}  // namespace
