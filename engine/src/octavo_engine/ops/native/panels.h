// The layouts of a weight, and what follows the sums of a linear layer: bias, rounding or activation, and the stores.
//
// A weight is in bf16, or in blocks of 32 inputs with 16-bit scales, which `expand.h` turns into bf16 in the CPU's cache.
// Panels of 32 outputs, each the run [in / 32][2 units][16 pairs of inputs][16 outputs][2]: a unit of a step of 32 inputs is
// 1 KB, at once a tile of AMX, 16 registers of AVX512 and 32 of AVX2. `in` and `out` are padded with zeros to 32.
// A step of blocks is [2 units][words of 32 bits][16 outputs], then fp16 scales [32] and, of a format with minima, fp16
// minima [32]. Word j of an output is bytes 4j to 4j + 3 of the quants of its block in the GGUF file, of int8 plus 128.
// If the weight is `gated`, unit 0 of a panel has gates and unit 1 the same outputs of the second half, so that the
// activation needs one panel only. Each half is then a multiple of 16.
#pragma once

#include "activations.h"
#include "vectors.h"

extern "C" {

// weight = scale * quant + minimum, of unsigned quants of 8 or 4 bits. The minimum is -128 scale, -8 scale, or stored.
enum Format : int64_t { kBFloat16 = 0, kQ8_0 = 1, kQ4_0 = 2, kQ4_1 = 3 };

// The parameters of one layer. bias: fp32 [out] or null. weight: panels, also of a format in blocks.
struct Linear {
  const uint8_t* weight;
  const float* bias;
  int64_t in, out, gated;
  Format format;
};

}  // extern "C"

namespace {

constexpr int kUnit = 16, kPanel = 32, kStep = 32, kUnitElements = kUnit * kStep, kStepElements = kPanel * kStep;

inline int64_t steps_of(const Linear& l) { return (l.in + kStep - 1) / kStep; }
inline int64_t panels_of(const Linear& l) { return (l.out + kPanel - 1) / kPanel; }

// The bytes of one output's quants, and of its quants, scale and minimum, in a step.
constexpr int quant_bytes(Format f) { return f == kBFloat16 ? 2 * kStep : f == kQ8_0 ? kStep : kStep / 2; }
constexpr int block_bytes(Format f) { return quant_bytes(f) + (f == kBFloat16 ? 0 : f == kQ4_1 ? 4 : 2); }
inline int64_t step_bytes(const Linear& l) { return kPanel * block_bytes(l.format); }
inline const uint8_t* step_of(const Linear& l, int64_t panel, int64_t step) {
  return l.weight + (panel * steps_of(l) + step) * step_bytes(l);
}

// The first output of a unit; `out` or more if the unit is padding.
inline int64_t output_of(const Linear& l, int64_t panel, int unit) {
  return l.gated ? unit * (l.out / 2) + panel * kUnit : panel * kPanel + unit * kUnit;
}

enum Result : int32_t { kRounded = 0, kFloat = 1, kActivated = 2 };  // bf16; fp32; bf16 [rows, out / 2]

struct Call {
  const BFloat16* x;  // rows `x_stride` elements apart
  int64_t x_stride, rows;
  void* out;  // contiguous
  Result result;
  int32_t activation;
  int num_threads;
};

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
      save_unit(sums + unit * kUnit, rows, count, static_cast<BFloat16*>(a.out) + row * l.out + first, l.out);
    if (a.result == kFloat)
      save_unit(sums + unit * kUnit, rows, count, static_cast<float*>(a.out) + row * l.out + first, l.out);
  }
  if (a.result != kActivated) return;
  BFloat16* out = static_cast<BFloat16*>(a.out) + row * (l.out / 2) + panel * kUnit;
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < kUnit; i += kLanes)
      store(out + r * (l.out / 2) + i,
            gated<BFloat16>(load(sums + r * kPanel + i), load(sums + r * kPanel + kUnit + i), a.activation));
}

}  // namespace
