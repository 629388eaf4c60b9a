// The layouts of a weight, and what follows the sums of a linear layer: bias, rounding or activation, and the stores.
//
// A weight is in bf16, or in blocks of 32 inputs with 16-bit scales.
// Panels of 32 outputs, each the run [in / 32][2 units][16 pairs of inputs][16 outputs][2]: a unit of a step of 32 inputs is
// 1 KB, at once a tile of AMX, 16 registers of AVX512 and 32 of AVX2. `in` and `out` are padded with zeros to 32.
// A step of blocks is [2 units][words of 32 bits][16 outputs], then the numbers of each block, each number as [32]: fp16
// scales and, of a format with minima, fp16 minima; of K types two bytes, whose fp16 factors precede each group of 8 steps.
// Word j of an output has the low 4 bits of quants 4j to 4j + 3 in the lower halves of its bytes, and of 4j + 16 to 4j + 19
// in the upper ones. Further words have the other bits in the same order, of quants of 5 bits of all words j, bit j of each
// half byte, of 6 bits of two words j each. Quants of 8 bits are in order.
// If the weight is `gated`, unit 0 of a panel has gates and unit 1 the same outputs of the second half, so that the
// activation needs one panel only. Each half is then a multiple of 16.
#pragma once

#include "activation_functions.h"
#include "pair_sums.h"

extern "C" {

// weight = scale * quant + minimum, of unsigned quants. The minimum is stored, or -scale * half the number of quants.
// K types have groups of 8 blocks. Q4_K, Q5_K: scale = factor * byte, minimum = -factor * byte, of bytes below 64; Q6_K:
// two scales = factor * int8, of quants 0 to 15 and of quants 16 to 31.
enum Format : int64_t {
  kBFloat16 = 0,
  kQ8_0 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 4,
  kQ5_1 = 5,
  kQ4_K = 6,
  kQ5_K = 7,
  kQ6_K = 8
};

// The parameters of one layer. bias: fp32 [out] or null. weight: panels, also of a format in blocks.
struct Linear {
  const uint8_t* weight;
  const float* bias;
  int64_t in, out, gated;
  Format format;
};

}  // extern "C"

namespace {

constexpr int kPanel = 32, kStep = 32, kUnitElements = kUnit * kStep, kStepElements = kPanel * kStep;
constexpr int kGroupSteps = 8;

inline int64_t steps_of(const Linear& l) { return (l.in + kStep - 1) / kStep; }
inline int64_t panels_of(const Linear& l) { return (l.out + kPanel - 1) / kPanel; }

constexpr bool is_k_type(Format f) { return f >= kQ4_K; }
constexpr bool has_minima(Format f) { return f == kQ4_1 || f == kQ5_1 || f == kQ4_K || f == kQ5_K; }
constexpr int low_bits(Format f) { return f == kBFloat16 ? 16 : f == kQ8_0 ? 8 : 4; }
constexpr int high_bits(Format f) { return f == kQ6_K ? 2 : f == kQ5_0 || f == kQ5_1 || f == kQ5_K ? 1 : 0; }

// The bytes of one output in a step: of its quants, and with the numbers of its block.
constexpr int quant_bytes(Format f) { return (low_bits(f) + high_bits(f)) * kStep / 8; }
constexpr int block_bytes(Format f) {
  return quant_bytes(f) + (f == kBFloat16 ? 0 : has_minima(f) && !is_k_type(f) ? 4 : 2);
}
// The bytes of one output's factors, which precede a group of steps.
constexpr int factor_bytes(Format f) { return !is_k_type(f) ? 0 : has_minima(f) ? 4 : 2; }
// `step` counts the steps of all panels. A panel of a K type is whole groups.
constexpr int64_t step_offset(Format f, int64_t step) {
  return kPanel * (step * block_bytes(f) + (step / kGroupSteps + 1) * factor_bytes(f));
}
inline int64_t step_bytes(const Linear& l) { return kPanel * block_bytes(l.format); }
inline const uint8_t* step_of(const Linear& l, int64_t panel, int64_t step) {
  return l.weight + step_offset(l.format, panel * steps_of(l) + step);
}

// The first output of a unit; `out` or more if the unit is padding.
inline int64_t output_of(const Linear& l, int64_t panel, int unit) {
  return l.gated ? unit * (l.out / 2) + panel * kUnit : panel * kPanel + unit * kUnit;
}

enum Result : int32_t { kRounded = 0, kFloat = 1, kActivated = 2 };  // bf16; fp32; bf16 of out / 2 columns

struct Call {
  const BFloat16* x;  // rows `x_stride` elements apart
  int64_t x_stride, rows;
  void* out;  // rows `out_stride` elements apart
  int64_t out_stride;
  Result result;
  int32_t activation;
  int num_threads;
};

// The call for up to `count` rows from `row`.
inline Call rows_of(Call a, int64_t row, int64_t count) {
  a.x += row * a.x_stride;
  a.out = static_cast<uint8_t*>(a.out) + row * a.out_stride * (a.result == kFloat ? 4 : 2);
  a.rows = std::min(count, a.rows - row);
  return a;
}

// Where the outputs of the part of a layer that follows `l` are stored.
inline void* next_part(const Call& a, const Linear& l) {
  return static_cast<uint8_t*>(a.out) + l.out * (a.result == kFloat ? 4 : 2);
}

template <typename T>
void save_unit(const float* sums, int rows, int64_t count, T* out, int64_t stride) {
  for (int r = 0; r < rows; r++)
    for (int64_t i = 0; i < count; i += kLanes)
      store_up_to(out + r * stride + i, load(sums + r * kPanel + i), count - i);
}

// Adds the bias to the sums [rows][32] of a panel and stores the results of rows [row, row + rows).
inline void finish(const Linear& l, const Call& a, int64_t panel, int64_t row, int rows, float* sums) {
  for (int unit = 0; unit < 2; unit++) {
    int64_t first = output_of(l, panel, unit), count = std::min<int64_t>(kUnit, l.out - first);
    for (int r = 0; l.bias && r < rows; r++)
      for (int64_t i = 0; i < count; i++) sums[r * kPanel + unit * kUnit + i] += l.bias[first + i];
    if (a.result == kRounded)
      save_unit(sums + unit * kUnit, rows, count, static_cast<BFloat16*>(a.out) + row * a.out_stride + first, a.out_stride);
    if (a.result == kFloat)
      save_unit(sums + unit * kUnit, rows, count, static_cast<float*>(a.out) + row * a.out_stride + first, a.out_stride);
  }
  if (a.result != kActivated) return;
  BFloat16* out = static_cast<BFloat16*>(a.out) + row * a.out_stride + panel * kUnit;
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < kUnit; i += kLanes)
      store(out + r * a.out_stride + i,
            gated<BFloat16>(load(sums + r * kPanel + i), load(sums + r * kPanel + kUnit + i), a.activation));
}

}  // namespace
