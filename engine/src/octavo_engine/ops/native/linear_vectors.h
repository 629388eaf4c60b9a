// Linear layers by vectors: tiles of some rows by one or two panels, kept in registers over all inputs.
//
// An output is one chain of fp32 sums over pairs of inputs in order.
#pragma once

#include <omp.h>

#include "panels.h"

namespace {

constexpr int kRows = 6;

inline Factor factor_of(const BFloat16* x, int count) {
#if defined(__AVX512BF16__)
  uint32_t pair = 0;
  std::memcpy(&pair, x, size_t(2 * count));
  return pair;
#else
  return {to_float(x[0]), count > 1 ? to_float(x[1]) : 0.0f};
#endif
}

// Computes out[panel][row][32] for Rows rows and Panels panels, which are `panel_size` elements apart. `ahead`: the weights
// that are read after these, of which `lines` a step are prefetched.
template <int Rows, int Panels>
void tile(const BFloat16* x, int64_t x_stride, int64_t in, const uint16_t* weight, int64_t panel_size, float* out,
          const uint8_t* ahead, int lines) {
  constexpr int kUnits = 2 * Panels;
  PairSums sums[Rows][kUnits];
  auto add = [&](const uint16_t* pairs, int r, Factor pair) {
#pragma GCC unroll 4
    for (int u = 0; u < kUnits; u++) sums[r][u].add(pairs + u / 2 * panel_size + u % 2 * kUnitElements, pair);
  };
  const uint16_t* pairs = weight;
  for (int64_t k = 0; k < in / 2; pairs += kUnitElements) {  // a step; the inner loop passes its first unit
    for (int i = 0; i < lines; i++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    for (const int64_t end = std::min(k + kStep / 2, in / 2); k < end; k++, pairs += 2 * kUnit) {
#pragma GCC unroll 6
      for (int r = 0; r < Rows; r++) add(pairs, r, factor_of(x + r * x_stride + 2 * k, 2));
    }
  }
  if (in % 2) {
    pairs = weight + in / kStep * kStepElements + in % kStep / 2 * 2 * kUnit;
    for (int r = 0; r < Rows; r++) add(pairs, r, factor_of(x + r * x_stride + in - 1, 1));
  }
  for (int r = 0; r < Rows; r++)
    for (int u = 0; u < kUnits; u++) sums[r][u].save(out + (u / 2 * kRows + r) * kPanel + u % 2 * kUnit);
}

using Tile = void (*)(const BFloat16*, int64_t, int64_t, const uint16_t*, int64_t, float*, const uint8_t*, int);
template <int R>
constexpr Tile kTileRow[2] = {tile<R, 1>, tile<R, 2>};
constexpr const Tile* kTiles[kRows] = {kTileRow<1>, kTileRow<2>, kTileRow<3>, kTileRow<4>, kTileRow<5>, kTileRow<6>};

// Computes all rows of panels [first, last), some rows of two panels at a time. While several tiles of rows pass, the next
// two panels are prefetched.
void multiply_panels(const Linear& l, const Call& a, int64_t first, int64_t last) {
  const int64_t panel_size = steps_of(l) * kStepElements, tiles = (a.rows + kRows - 1) / kRows;
  const int lines = tiles > 1 ? int((2 * step_bytes(l) / 64 + tiles - 1) / tiles) : 0;
  alignas(64) float sums[2 * kRows * kPanel];
  for (int64_t p = first; p < last; p += 2) {
    const int count = int(std::min<int64_t>(2, last - p));
    const uint16_t* weight = reinterpret_cast<const uint16_t*>(step_of(l, p, 0));
    const uint8_t *ahead = step_of(l, p + 2, 0), *end = step_of(l, p + 4, 0);
    for (int64_t r = 0; r < a.rows; r += kRows, ahead += 64 * lines * steps_of(l)) {
      const int rows = int(std::min<int64_t>(kRows, a.rows - r));
      kTiles[rows - 1][count - 1](a.x + r * a.x_stride, a.x_stride, l.in, weight, panel_size, sums, ahead,
                                   ahead < end ? lines : 0);
      for (int i = 0; i < count; i++) finish(l, a, p + i, r, rows, sums + i * kRows * kPanel);
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
