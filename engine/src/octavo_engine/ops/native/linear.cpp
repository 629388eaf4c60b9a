// Linear layers in bf16 for any number of rows, limited by memory bandwidth for few rows: one thread reads each weight
// once per tile of rows. Plain C ABI.
//
// Layout. The project packs the weight [out, in] itself (`packed_blocks` in native_linear.py), independently of oneDNN,
// whose layout differs: [out / 64][in / 2][64][2], with `in` padded to 32 and `out` to 64 by zeros. One load gives two
// inputs of 16 outputs, the operands of one AVX512-bf16 instruction.
// Work. A unit is 16 outputs. Each thread computes a run of units, so threads never share an output; a tile is some rows
// by the units of one block of 64, kept in registers over all of `in`.
// Numerics. An output is one chain of fp32 sums over pairs of inputs in order, then the bias; it is rounded once, or not
// at all if `out` is fp32. Its bits depend neither on other rows nor on the number of threads.

#include <omp.h>

#include "activations.h"
#include "vectors.h"
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int kUnit = 16, kUnits = 4, kBlock = kUnit * kUnits, kRows = 6;

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
struct Sums {
  Vec sum[kUnit / kLanes] = {};
  void add(const uint16_t* weight, uint32_t pair) {
    Vec even = splat(as_float(pair << 16)), odd = splat(as_float(pair & 0xffff0000u));
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
  static float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
};
#endif

inline uint32_t pair_of(const BFloat16* x) {
  uint32_t pair;
  std::memcpy(&pair, x, 4);
  return pair;
}

// Computes out[row][0..16 * Units) for Rows rows. `weight` points to the first unit of the tile within its block.
template <int Rows, int Units>
void tile(const BFloat16* x, int64_t x_stride, int64_t in, const uint16_t* weight, float* out, int64_t out_stride) {
  Sums sums[Rows][Units];
  for (int64_t k = 0; k < in / 2; k++, weight += 2 * kBlock) {
#pragma GCC unroll 6
    for (int r = 0; r < Rows; r++) {
      uint32_t pair = pair_of(x + r * x_stride + 2 * k);
#pragma GCC unroll 4
      for (int u = 0; u < Units; u++) sums[r][u].add(weight + 2 * kUnit * u, pair);
    }
  }
  if (in % 2)
    for (int r = 0; r < Rows; r++)
      for (int u = 0; u < Units; u++) sums[r][u].add(weight + 2 * kUnit * u, x[r * x_stride + in - 1].bits);
  for (int r = 0; r < Rows; r++)
    for (int u = 0; u < Units; u++) sums[r][u].save(out + r * out_stride + kUnit * u);
}

using Tile = void (*)(const BFloat16*, int64_t, int64_t, const uint16_t*, float*, int64_t);
template <int R>
constexpr Tile kTileRow[kUnits] = {tile<R, 1>, tile<R, 2>, tile<R, 3>, tile<R, 4>};
constexpr const Tile* kTiles[kRows] = {kTileRow<1>, kTileRow<2>, kTileRow<3>, kTileRow<4>, kTileRow<5>, kTileRow<6>};

}  // namespace

extern "C" {

// The parameters of one layer. bias: fp32 [out] or null.
struct Linear {
  const uint16_t* weight;
  const float* bias;
  int64_t in, out;
};

}  // extern "C"

namespace {

struct Call {
  const BFloat16* x;
  int64_t x_stride, rows;
  void* out;
  int num_threads;
};

// Computes units [first, last), all in one block, of up to kRows rows, and adds the bias.
void sums_of(const Linear& l, const BFloat16* x, int64_t x_stride, int rows, int64_t first, int64_t last, float* out) {
  int64_t padded = (l.in + 31) / 32 * 32, units = last - first;
  const uint16_t* weight = l.weight + first / kUnits * padded * kBlock + first % kUnits * 2 * kUnit;
  kTiles[rows - 1][units - 1](x, x_stride, l.in, weight, out, kBlock);
  if (!l.bias) return;
  for (int64_t i = 0; i < std::min(units * kUnit, l.out - first * kUnit); i++)
    for (int r = 0; r < rows; r++) out[r * kBlock + i] += l.bias[first * kUnit + i];
}

template <typename T>
void save(const float* sums, int rows, int64_t count, T* out, int64_t stride) {
  for (int r = 0; r < rows; r++)
    for (int64_t i = 0; i < count; i += kLanes)
      store_up_to(out + r * stride + i, load(sums + r * kBlock + i), count - i);
}

struct Share {  // the units of the calling thread: [first, last)
  Share(int64_t units) {
    int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    first = units * thread / threads, last = units * (thread + 1) / threads;
  }
  int64_t first, last;
};

template <typename F>
void for_blocks(Share share, const F& block) {
  for (int64_t u = share.first, end; u < share.last; u = end) {
    end = std::min((u / kUnits + 1) * kUnits, share.last);
    block(u, end);
  }
}

template <typename T>
void multiply(const Linear& l, const Call& a) {
#pragma omp parallel num_threads(a.num_threads) if (a.num_threads > 1)
  for_blocks(Share((l.out + kUnit - 1) / kUnit), [&](int64_t first, int64_t last) {
    alignas(64) float sums[kRows * kBlock];
    for (int64_t r = 0; r < a.rows; r += kRows) {
      int rows = int(std::min<int64_t>(kRows, a.rows - r));
      sums_of(l, a.x + r * a.x_stride, a.x_stride, rows, first, last, sums);
      int64_t count = std::min((last - first) * kUnit, l.out - first * kUnit);
      save(sums, rows, count, static_cast<T*>(a.out) + r * l.out + first * kUnit, l.out);
    }
  });
}

// Gate and up are the halves of the outputs, each whole units; a thread computes the same units of both halves.
void multiply_gated(const Linear& l, const Call& a, int32_t activation) {
  const int64_t size = l.out / 2, half = size / kUnit;
#pragma omp parallel num_threads(a.num_threads) if (a.num_threads > 1)
  for_blocks(Share(half), [&](int64_t first, int64_t last) {
    alignas(64) float gate[kRows * kBlock], up[kRows * kBlock];
    for (int64_t r = 0; r < a.rows; r += kRows) {
      int rows = int(std::min<int64_t>(kRows, a.rows - r));
      const BFloat16* x = a.x + r * a.x_stride;
      BFloat16* out = static_cast<BFloat16*>(a.out) + r * size;
      sums_of(l, x, a.x_stride, rows, first, last, gate);
      for (int64_t u = first + half, end; u < last + half; u = end) {  // these units may be in two blocks
        end = std::min((u / kUnits + 1) * kUnits, last + half);
        sums_of(l, x, a.x_stride, rows, u, end, up + (u - first - half) * kUnit);
      }
      for (int i = 0; i < rows; i++)
        for (int64_t c = 0; c < (last - first) * kUnit; c += kLanes)
          store(out + i * size + first * kUnit + c,
                gated<BFloat16>(load(gate + i * kBlock + c), load(up + i * kBlock + c), activation));
    }
  });
}

}  // namespace

extern "C" {

// x: bf16 [rows, in], rows `x_stride` apart; out: [rows, out], contiguous, bf16 or fp32.
void octavo_linear(const Linear* l, const void* x, int64_t x_stride, int64_t rows, void* out, int32_t out_is_float,
                   int32_t num_threads) {
  Call call{static_cast<const BFloat16*>(x), x_stride, rows, out, num_threads};
  out_is_float ? multiply<float>(*l, call) : multiply<BFloat16>(*l, call);
}

// out: bf16 [rows, out / 2] = activation(first half) * second half; each half must be whole units of 16.
void octavo_linear_gated(const Linear* l, const void* x, int64_t x_stride, int64_t rows, void* out, int32_t activation,
                         int32_t num_threads) {
  multiply_gated(*l, {static_cast<const BFloat16*>(x), x_stride, rows, out, num_threads}, activation);
}

}  // extern "C"
