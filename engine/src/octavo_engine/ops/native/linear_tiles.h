// Linear layers by AMX tiles: 32 rows by one panel, or up to 16 rows by two panels, are four tiles of sums.
//
// More than 32 rows are first copied as tiles [rows / 16][in / 32][16][32] with zeros after the last row and input. They
// are computed `kChunkRows` at a time: for a group of panels, the inputs pass in slices, so that a slice of the rows
// stays in the second cache and a slice of a panel in the first. The sums of a group wait in memory between slices.
#pragma once

#include <omp.h>

#include "buffer.h"
#include "panels.h"
#include "tiles.h"

namespace {

constexpr int kTileElements = kTileRows * kStep, kChunkRows = 512, kGroup = 8, kSliceSteps = 20;
constexpr int kStepsAhead = 4;
constexpr int kSumBytes = kPanel * 4;  // of a row of a panel

// The input as tiles: tile `step` of the 16 rows `block` starts at data + block * block_size + step * step_size.
struct Tiles {
  const BFloat16* data;
  int64_t block_size, step_size;  // in elements
  int64_t row_bytes;
  const BFloat16* at(int64_t block, int64_t step) const { return data + block * block_size + step * step_size; }
};

inline void copy_as_tiles(const Linear& l, const Call& a, int64_t block, BFloat16* to) {
  for (int64_t s = 0; s < steps_of(l); s++, to += kTileElements)
    for (int r = 0; r < kTileRows; r++) {
      int64_t row = block * kTileRows + r, count = row < a.rows ? std::min<int64_t>(kStep, l.in - s * kStep) : 0;
      if (count > 0) std::memcpy(to + r * kStep, a.x + row * a.x_stride + s * kStep, size_t(count) * 2);
      if (count < kStep) std::memset(to + r * kStep + count, 0, size_t(kStep - count) * 2);
    }
}

inline void zero_sums() {
  tile_zero(0);
  tile_zero(1);
  tile_zero(2);
  tile_zero(3);
}

inline void prefetch_step(const Linear& l, int64_t panel, int64_t step) {
  for (int64_t i = 0; i < step_bytes(l); i += 64) __builtin_prefetch(step_of(l, panel, step) + i, 0, 3);
}

inline const uint16_t* pairs_of(const Linear& l, int64_t panel, int64_t step) {
  return reinterpret_cast<const uint16_t*>(step_of(l, panel, step));
}

// Up to 16 rows, two panels at a time.
void multiply_few(const Linear& l, const Call& a, const Tiles& x, int64_t first, int64_t last) {
  alignas(64) float sums[2][kTileRows * kPanel];
  const int64_t steps = steps_of(l);
  configure_tiles(int(a.rows), int(a.rows));
  for (int64_t p = first; p < last; p += 2) {
    const int64_t q = p + 1 < last ? p + 1 : p;
    zero_sums();
    for (int64_t s = 0; s < steps; s++) {
      prefetch_step(l, p, s + kStepsAhead), prefetch_step(l, q, s + kStepsAhead);
      const uint16_t *w = pairs_of(l, p, s), *v = pairs_of(l, q, s);
      tile_load(4, x.at(0, s), x.row_bytes);
      tile_load(6, w, 64);
      tile_product(0, 4, 6);
      tile_load(7, w + kUnitElements, 64);
      tile_product(1, 4, 7);
      tile_load(6, v, 64);
      tile_product(2, 4, 6);
      tile_load(7, v + kUnitElements, 64);
      tile_product(3, 4, 7);
    }
    tile_store(0, sums[0], kSumBytes);
    tile_store(1, sums[0] + kUnit, kSumBytes);
    tile_store(2, sums[1], kSumBytes);
    tile_store(3, sums[1] + kUnit, kSumBytes);
    finish(l, a, p, 0, int(a.rows), sums[0]);
    if (p + 1 < last) finish(l, a, p + 1, 0, int(a.rows), sums[1]);
  }
}

// The products of steps [begin, end) of one panel and the 16 rows of `block` and, if `two`, the next 16. `sums` holds the
// rows' sums of steps before `begin`. `ahead`: the panel that is read next, of which `lines` a step are prefetched.
template <bool two>
void multiply_slice(const Tiles& x, int64_t block, const uint16_t* w, int64_t begin, int64_t end, float* sums,
                    const uint8_t* ahead, int lines) {
  float* lower = sums + kTileRows * kPanel;
  if (begin == 0) {
    zero_sums();
  } else {
    tile_load(0, sums, kSumBytes);
    tile_load(1, sums + kUnit, kSumBytes);
    if (two) {
      tile_load(2, lower, kSumBytes);
      tile_load(3, lower + kUnit, kSumBytes);
    }
  }
  for (int64_t s = begin; s < end; s++, w += kStepElements) {
    tile_load(6, w, 64);
    tile_load(4, x.at(block, s), x.row_bytes);
    tile_product(0, 4, 6);
    tile_load(7, w + kUnitElements, 64);
    tile_product(1, 4, 7);
    if (two) {
      tile_load(5, x.at(block + 1, s), x.row_bytes);
      tile_product(2, 5, 6);
      tile_product(3, 5, 7);
    }
    for (int i = 0; i < lines; i++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
  }
  tile_store(0, sums, kSumBytes);
  tile_store(1, sums + kUnit, kSumBytes);
  if (two) {
    tile_store(2, lower, kSumBytes);
    tile_store(3, lower + kUnit, kSumBytes);
  }
}

// Rows [16 * block, 16 * end_block) of panels [first, last), at most kGroup panels.
void multiply_group(const Linear& l, const Call& a, const Tiles& x, int64_t first, int64_t last, int64_t block,
                    int64_t end_block, float* sums) {
  const int64_t steps = steps_of(l), slices = (steps + kSliceSteps - 1) / kSliceSteps, blocks = end_block - block;
  const int64_t panel_sums = blocks * kTileRows * kPanel;
  const int lines = int(2 * (step_bytes(l) / 64) / blocks) + 1;
  for (int64_t i = 0; i < slices; i++) {
    const int64_t begin = steps * i / slices, end = steps * (i + 1) / slices;
    for (int64_t p = first; p < last; p++) {
      const uint16_t* w = pairs_of(l, p, begin);
      const uint8_t* next = p + 1 < last ? step_of(l, p + 1, begin) : step_of(l, first, end);
      for (int64_t b = 0; b < blocks; b += 2) {
        float* c = sums + (p - first) * panel_sums + b * kTileRows * kPanel;
        const uint8_t* ahead = next + b / 2 * (end - begin) * lines * 64;
        b + 1 < blocks ? multiply_slice<true>(x, block + b, w, begin, end, c, ahead, lines)
                       : multiply_slice<false>(x, block + b, w, begin, end, c, ahead, lines);
        if (end < steps) continue;
        int64_t row = (block + b) * kTileRows;
        finish(l, a, p, row, int(std::min<int64_t>(2 * kTileRows, a.rows - row)), c);
      }
    }
  }
}

void multiply_many(const Linear& l, const Call& a, const Tiles& x, int64_t first, int64_t last) {
  static thread_local Buffer<float> buffer;
  const int64_t blocks = (a.rows + kTileRows - 1) / kTileRows, most = kChunkRows / kTileRows;
  float* sums = buffer.reserve(size_t(kGroup * kTileRows * kPanel * std::min(blocks, most)));
  const bool is_whole = a.rows % kTileRows == 0 || x.row_bytes == kStep * 2;
  configure_tiles(16, is_whole ? 16 : int(a.rows % kTileRows));  // if not whole, there are two blocks
  for (int64_t b = 0; b < blocks; b += most)
    for (int64_t p = first; p < last; p += kGroup)
      multiply_group(l, a, x, p, std::min(p + kGroup, last), b, std::min(b + most, blocks), sums);
}

// Up to 32 rows are read in place, if their inputs are whole steps.
void multiply(const Linear& l, const Call& a) {
  static thread_local Buffer<BFloat16> buffer;
  if (a.rows == 0) return;
  const int64_t panels = panels_of(l), steps = steps_of(l), blocks = (a.rows + kTileRows - 1) / kTileRows;
  const bool in_place = a.rows <= 2 * kTileRows && l.in % kStep == 0;
  BFloat16* copy = in_place ? nullptr : buffer.reserve(size_t(blocks * steps * kTileElements));
  const Tiles x = in_place ? Tiles{a.x, kTileRows * a.x_stride, kStep, a.x_stride * 2}
                           : Tiles{copy, steps * kTileElements, kTileElements, kStep * 2};
#pragma omp parallel num_threads(a.num_threads) if (a.num_threads > 1)
  {
    if (!in_place) {
#pragma omp for schedule(static)
      for (int64_t b = 0; b < blocks; b++) copy_as_tiles(l, a, b, copy + b * steps * kTileElements);
    }
    int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    auto multiply_panels = blocks == 1 ? multiply_few : multiply_many;
    multiply_panels(l, a, x, panels * thread / threads, panels * (thread + 1) / threads);
    tile_release();  // torch's oneDNN uses tiles on the same threads and expects its own configuration
  }
}

}  // namespace
