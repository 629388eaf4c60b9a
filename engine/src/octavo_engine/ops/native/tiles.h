// AMX's tile instructions, or, with EMULATE_TILES, the same in plain C++, so that kernels written with tiles are tested on
// any CPU. The emulated products have the bits of the instructions.
#pragma once

#if defined(EMULATE_TILES) || defined(__AMX_BF16__)
#define OCTAVO_TILES 1

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

struct alignas(64) TileConfig {  // the operand of ldtilecfg
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

}  // namespace

#ifdef EMULATE_TILES

namespace {

struct EmulatedTiles {
  TileConfig config;
  uint8_t data[8][16][64];
};
thread_local EmulatedTiles emulated;

inline float flush_denormal(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
inline float fused(float a, float b, float c) {
  return flush_denormal(std::fma(flush_denormal(a), flush_denormal(b), flush_denormal(c)));
}
inline float float_of_bf16(const uint8_t* p) {
  uint32_t bits = uint32_t(p[0]) << 16 | uint32_t(p[1]) << 24;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline void tile_config(const TileConfig* config) {
  emulated.config = *config;
  std::memset(emulated.data, 0, sizeof emulated.data);
}
inline void tile_release() { emulated.config = {}; }
inline void tile_fence() {}
inline void tile_zero(int t) { std::memset(emulated.data[t], 0, sizeof emulated.data[t]); }
inline void tile_load(int t, const void* from, int64_t stride) {
  tile_zero(t);
  for (int r = 0; r < emulated.config.rows[t]; r++)
    std::memcpy(emulated.data[t][r], static_cast<const char*>(from) + r * stride, emulated.config.row_bytes[t]);
}
inline void tile_store(int t, void* to, int64_t stride) {
  for (int r = 0; r < emulated.config.rows[t]; r++)
    std::memcpy(static_cast<char*>(to) + r * stride, emulated.data[t][r], emulated.config.row_bytes[t]);
}
// The CPU refuses a product of other shapes.
inline void check_shapes(int sums, int left, int right) {
  const TileConfig& c = emulated.config;
  const bool fits = c.rows[left] == c.rows[sums] && c.row_bytes[left] == 4 * c.rows[right];
  if (!fits || c.row_bytes[right] != c.row_bytes[sums]) std::abort();
}
// tdpbf16ps: the even and the odd inputs are two chains of fused multiply-adds from 0; then sum + (even + odd) is
// rounded. Denormals are zero. Measured on a CPU with AMX.
inline void tile_product(int sums, int left, int right) {
  check_shapes(sums, left, right);
  for (int m = 0; m < emulated.config.rows[sums]; m++)
    for (int n = 0; n < emulated.config.row_bytes[sums] / 4; n++) {
      float sum, even = 0, odd = 0;
      std::memcpy(&sum, &emulated.data[sums][m][n * 4], 4);
      for (int k = 0; k < emulated.config.row_bytes[left] / 4; k++) {
        const uint8_t *x = &emulated.data[left][m][k * 4], *w = &emulated.data[right][k][n * 4];
        even = fused(float_of_bf16(x), float_of_bf16(w), even);
        odd = fused(float_of_bf16(x + 2), float_of_bf16(w + 2), odd);
      }
      sum = flush_denormal(flush_denormal(sum) + flush_denormal(even + odd));
      std::memcpy(&emulated.data[sums][m][n * 4], &sum, 4);
    }
}
// tdpbsud: each sum in int32 gets the products of int8 on the left by unsigned bytes on the right.
inline void tile_byte_product(int sums, int left, int right) {
  check_shapes(sums, left, right);
  for (int m = 0; m < emulated.config.rows[sums]; m++)
    for (int k = 0; k < emulated.config.row_bytes[left]; k++)
      for (int n = 0; n < emulated.config.row_bytes[sums] / 4; n++) {
        int32_t sum;
        std::memcpy(&sum, &emulated.data[sums][m][n * 4], 4);
        sum += int8_t(emulated.data[left][m][k]) * emulated.data[right][k / 4][n * 4 + k % 4];
        std::memcpy(&emulated.data[sums][m][n * 4], &sum, 4);
      }
}

}  // namespace

#else

#include <immintrin.h>

#define tile_release _tile_release
#define tile_zero _tile_zero
#define tile_load _tile_loadd
#define tile_store _tile_stored
#define tile_product _tile_dpbf16ps
#define tile_byte_product _tile_dpbsud

namespace {

inline void tile_fence() { asm volatile("" ::: "memory"); }  // the compiler does not know which memory tiles are read from
inline void tile_config(const TileConfig* config) {
  tile_fence();
  _tile_loadconfig(config);
}

}  // namespace

#endif

namespace {

constexpr int kTileRows = 16;

// Tiles 0-3 hold sums, 4 and 5 rows of the input, 6 and 7 weights. `upper`, `lower`: the rows of tiles 4 and 5, which have
// `bytes` each.
inline void configure_tiles(int upper, int lower, int bytes = 64) {
  TileConfig config;
  for (int t = 0; t < 8; t++) config.row_bytes[t] = 64, config.rows[t] = 16;
  config.row_bytes[4] = config.row_bytes[5] = uint16_t(bytes);
  config.rows[6] = config.rows[7] = uint8_t(bytes / 4);
  config.rows[0] = config.rows[1] = config.rows[4] = uint8_t(upper);
  config.rows[2] = config.rows[3] = config.rows[5] = uint8_t(lower);
  tile_config(&config);
}

}  // namespace

#else

namespace {

constexpr int kTileRows = 0;
inline void configure_tiles(int, int, int) {}
inline void tile_release() {}

}  // namespace

#endif
