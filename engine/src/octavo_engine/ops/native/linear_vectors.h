// Linear layers by vectors: tiles of some rows by one or two panels, kept in registers over all inputs.
//
// An output is one chain of fp32 sums over pairs of inputs in order. Blocks are expanded a slice of the inputs at a time,
// for up to kChunkRows rows, whose sums wait in memory between slices.
#pragma once

#include <omp.h>

#include "buffer.h"
#include "expand.h"
#include "pair_sums.h"

namespace {

constexpr int kRows = 6, kChunkRows = 64 * kRows, kStepsAhead = 16;

inline Factor factor_of(const BFloat16* x, int count) {
#if defined(__AVX512BF16__)
  uint32_t pair = 0;
  std::memcpy(&pair, x, size_t(2 * count));
  return pair;
#else
  return {to_float(x[0]), count > 1 ? to_float(x[1]) : 0.0f};
#endif
}

// Computes out[panel][row][32] for Rows rows and Panels panels, which are `panel_size` elements apart. `resumed`: `out`
// has the sums of earlier inputs.
template <int Rows, int Panels>
void tile(const BFloat16* x, int64_t x_stride, int64_t in, const uint16_t* weight, int64_t panel_size, float* out,
          bool resumed) {
  constexpr int kUnits = 2 * Panels;
  PairSums sums[Rows][kUnits];
  auto at = [&](int r, int u) { return out + (u / 2 * kRows + r) * kPanel + u % 2 * kUnit; };
  for (int r = 0; resumed && r < Rows; r++)
    for (int u = 0; u < kUnits; u++) sums[r][u].resume(at(r, u));
  auto add = [&](const uint16_t* pairs, int r, Factor pair) {
#pragma GCC unroll 4
    for (int u = 0; u < kUnits; u++) sums[r][u].add(pairs + u / 2 * panel_size + u % 2 * kUnitElements, pair);
  };
  const uint16_t* pairs = weight;
  for (int64_t k = 0; k < in / 2; pairs += kUnitElements)  // a step; the inner loop passes its first unit
    for (const int64_t end = std::min(k + kStep / 2, in / 2); k < end; k++, pairs += 2 * kUnit) {
#pragma GCC unroll 6
      for (int r = 0; r < Rows; r++) add(pairs, r, factor_of(x + r * x_stride + 2 * k, 2));
    }
  if (in % 2) {
    pairs = weight + in / kStep * kStepElements + in % kStep / 2 * 2 * kUnit;
    for (int r = 0; r < Rows; r++) add(pairs, r, factor_of(x + r * x_stride + in - 1, 1));
  }
  for (int r = 0; r < Rows; r++)
    for (int u = 0; u < kUnits; u++) sums[r][u].save(at(r, u));
}

using Tile = void (*)(const BFloat16*, int64_t, int64_t, const uint16_t*, int64_t, float*, bool);
template <int R>
constexpr Tile kTileRow[2] = {tile<R, 1>, tile<R, 2>};
constexpr const Tile* kTiles[kRows] = {kTileRow<1>, kTileRow<2>, kTileRow<3>, kTileRow<4>, kTileRow<5>, kTileRow<6>};

// The steps that are expanded at a time: for few rows so many that two panels stay in the first cache, else in the second.
inline int64_t slice_steps(const Linear& l, const Call& a) {
  return l.format == kBFloat16 ? steps_of(l) : a.rows <= kRows ? 4 : 32;
}

// Computes rows [row, row + rows), at most kChunkRows, of `count` panels, one or two.
void multiply_pair(const Linear& l, const Call& a, int64_t panel, int count, int64_t row, int64_t rows, float* sums,
                   uint16_t* scratch) {
  const int64_t steps = steps_of(l), slice = std::min(steps, slice_steps(l, a));
  for (int64_t begin = 0, end; begin < steps; begin = end) {
    end = std::min(begin + slice, steps);
    const int64_t panel_size = (l.format == kBFloat16 ? steps : slice) * kStepElements;
    const uint16_t* weight = bf16_steps(l, panel, begin, end, scratch, kStepsAhead, 2);
    if (count > 1) bf16_steps(l, panel + 1, begin, end, scratch + panel_size, kStepsAhead, 2);
    const int64_t first = begin * kStep, in = std::min(end * kStep, l.in) - first;
    float* out = sums;
    for (int64_t r = 0; r < rows; r += kRows, out += slice < steps ? 2 * kRows * kPanel : 0) {
      const int tile_rows = int(std::min<int64_t>(kRows, rows - r));
      kTiles[tile_rows - 1][count - 1](a.x + (row + r) * a.x_stride + first, a.x_stride, in, weight, panel_size, out,
                                       begin > 0);
      for (int i = 0; end == steps && i < count; i++)
        finish(l, a, panel + i, row + r, tile_rows, out + i * kRows * kPanel);
    }
  }
}

// Computes all rows of panels [first, last).
void multiply_panels(const Linear& l, const Call& a, int64_t first, int64_t last) {
  static thread_local Buffer<float> sums;
  static thread_local Buffer<uint16_t> scratch;
  const int64_t most = std::min<int64_t>(a.rows + kRows - 1, kChunkRows);
  float* waiting = sums.reserve(size_t(most * 2 * kPanel));
  uint16_t* expanded = l.format == kBFloat16 ? nullptr : scratch.reserve(size_t(2 * slice_steps(l, a) * kStepElements));
  for (int64_t p = first; p < last; p += 2)
    for (int64_t r = 0; r < a.rows; r += kChunkRows)
      multiply_pair(l, a, p, int(std::min<int64_t>(2, last - p)), r, std::min<int64_t>(kChunkRows, a.rows - r), waiting,
                    expanded);
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
