// Linear layers by vectors: tiles of some rows by one or two panels, kept in registers over all inputs.
//
// An output is one chain of fp32 sums over pairs of inputs in order.
#pragma once

#include <omp.h>

#include "panels.h"
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int kRows = 6;

// The sums of one row for one unit.
#if defined(__AVX512BF16__)
struct Sums {
  __m512 sum = _mm512_setzero_ps();
  void add(const uint16_t* weight, uint32_t pair) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(weight), (__m512bh)_mm512_set1_epi32(int(pair)));
  }
  void save(float* out) const { _mm512_storeu_ps(out, sum); }
};
#else
inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
struct Sums {
  Vec sum[kUnit / kLanes] = {};
  void add(const uint16_t* weight, uint32_t pair) {
    Vec even = splat(float_of_bits(pair << 16)), odd = splat(float_of_bits(pair & 0xffff0000u));
    for (int i = 0; i < kUnit / kLanes; i++) {
      BitVec bits;
      std::memcpy(&bits, weight + 2 * kLanes * i, sizeof bits);
      BitVec low = bits << 16, high = bits & 0xffff0000u;
      sum[i] += *reinterpret_cast<Vec*>(&low) * even;
      sum[i] += *reinterpret_cast<Vec*>(&high) * odd;
    }
  }
  void save(float* out) const {
    for (int i = 0; i < kUnit / kLanes; i++) store(out + kLanes * i, sum[i]);
  }
};
#endif

inline uint32_t pair_of(const BFloat16* x) {
  uint32_t pair;
  std::memcpy(&pair, x, 4);
  return pair;
}

// Computes out[panel][row][32] for Rows rows and Panels panels, which are `panel_size` elements apart.
template <int Rows, int Panels>
void tile(const BFloat16* x, int64_t x_stride, int64_t in, const uint16_t* weight, int64_t panel_size, float* out) {
  constexpr int kUnits = 2 * Panels;
  Sums sums[Rows][kUnits];
  auto add = [&](const uint16_t* pairs, int r, uint32_t pair) {
#pragma GCC unroll 4
    for (int u = 0; u < kUnits; u++) sums[r][u].add(pairs + u / 2 * panel_size + u % 2 * kUnitElements, pair);
  };
  const uint16_t* pairs = weight;
  for (int64_t k = 0; k < in / 2; pairs += kUnitElements)  // a step; the inner loop passes its first unit
    for (const int64_t end = std::min(k + kStep / 2, in / 2); k < end; k++, pairs += 2 * kUnit) {
#pragma GCC unroll 6
      for (int r = 0; r < Rows; r++) add(pairs, r, pair_of(x + r * x_stride + 2 * k));
    }
  if (in % 2) {
    pairs = weight + in / kStep * kStepElements + in % kStep / 2 * 2 * kUnit;
    for (int r = 0; r < Rows; r++) add(pairs, r, x[r * x_stride + in - 1].bits);
  }
  for (int r = 0; r < Rows; r++)
    for (int u = 0; u < kUnits; u++) sums[r][u].save(out + (u / 2 * kRows + r) * kPanel + u % 2 * kUnit);
}

using Tile = void (*)(const BFloat16*, int64_t, int64_t, const uint16_t*, int64_t, float*);
template <int R>
constexpr Tile kTileRow[2] = {tile<R, 1>, tile<R, 2>};
constexpr const Tile* kTiles[kRows] = {kTileRow<1>, kTileRow<2>, kTileRow<3>, kTileRow<4>, kTileRow<5>, kTileRow<6>};

// Computes all rows of panels [first, last).
void multiply_panels(const Linear& l, const Call& a, int64_t first, int64_t last) {
  alignas(64) float sums[2][kRows * kPanel];
  const int64_t panel_size = steps_of(l) * kStepElements;
  for (int64_t p = first, step; p < last; p += step) {
    step = std::min<int64_t>(2, last - p);
    for (int64_t r = 0; r < a.rows; r += kRows) {
      int rows = int(std::min<int64_t>(kRows, a.rows - r));
      kTiles[rows - 1][step - 1](a.x + r * a.x_stride, a.x_stride, l.in, panel_of(l, p), panel_size, sums[0]);
      for (int64_t i = 0; i < step; i++) finish(l, a, p + i, r, rows, sums[i]);
    }
  }
}

void multiply(const Linear& l, const Call& a) {
  const int64_t panels = panels_of(l);
#pragma omp parallel num_threads(a.num_threads) if (a.num_threads > 1)
  {
    int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    multiply_panels(l, a, panels * thread / threads, panels * (thread + 1) / threads);
  }
}

}  // namespace
