// Weights in blocks: copies a GGUF tensor into panels, and expands rows of a table of embeddings from panels.
// Plain C ABI; `panels.h` describes the weight.

#include <omp.h>

#include "expand.h"

namespace {

struct Place {
  int64_t panel;
  int lane;
};

inline Place place_of(const Linear& l, int64_t output) {
  if (!l.gated) return {output / kPanel, int(output % kPanel)};
  int64_t half = l.out / 2, unit = output >= half, i = output - unit * half;
  return {i / kUnit, int(unit * kUnit + i % kUnit)};
}

inline bool is_finite_fp16(const uint8_t* p) { return (p[1] & 0x7c) != 0x7c; }

// Copies a block, which is its scale, its minimum if there is one, and its quants; returns false if one is not finite.
inline bool copy_block(Format f, const uint8_t* block, uint8_t* step, int lane) {
  const int quants = quant_bytes(f), numbers = block_bytes(f) - quants;
  bool is_finite = true;
  for (int i = 0; i < numbers; i += 2) {
    std::memcpy(step + kPanel * (quants + i) + 2 * lane, block + i, 2);
    is_finite &= is_finite_fp16(block + i);
  }
  uint8_t* words = step + lane / kUnit * kUnit * quants + lane % kUnit * 4;
  for (int i = 0; i < quants; i += 4) {
    uint32_t word;
    std::memcpy(&word, block + numbers + i, 4);
    if (f == kQ8_0) word ^= 0x80808080u;
    std::memcpy(words + kUnit * i, &word, 4);
  }
  return is_finite;
}

void gather(const Linear& l, int64_t id, float scale, BFloat16* out) {
  const Place place = place_of(l, id);
  const int first = place.lane / kLanes * kLanes;
  const ExpandLanes expand = expand_lanes_of(l.format);
  alignas(64) uint16_t pairs[kUnitElements];
  for (int64_t s = 0; s < steps_of(l); s++) {
    expand(step_of(l, place.panel, s), first, pairs);
    for (int i = 0; i < kStep; i++) {
      BFloat16 value{pairs[i / 2 * 2 * kUnit + (place.lane - first) * 2 + i % 2]};
      from_float(to_float(value) * scale, out + s * kStep + i);
    }
  }
}

}  // namespace

extern "C" {

// Copies outputs [first, first + rows) into the panels. blocks: [rows, in / 32] blocks of `format` as in a GGUF file.
// Sets `bad_row` to the first row with an infinite or NaN scale or minimum; `rows` if there is none.
void octavo_pack_blocks(const Linear* l, uint8_t* panels, const uint8_t* blocks, int64_t first, int64_t rows,
                        int64_t* bad_row, int32_t num_threads) {
  const int64_t steps = steps_of(*l), size = block_bytes(l->format), groups = (rows + kUnit - 1) / kUnit;
  int64_t bad = rows;
#pragma omp parallel for num_threads(num_threads) reduction(min : bad) schedule(static)
  for (int64_t g = 0; g < groups; g++)
    for (int64_t s = 0; s < steps; s++)
      for (int64_t r = g * kUnit; r < std::min(rows, (g + 1) * kUnit); r++) {
        const Place place = place_of(*l, first + r);
        uint8_t* step = panels + (place.panel * steps + s) * step_bytes(*l);
        if (!copy_block(l->format, blocks + (r * steps + s) * size, step, place.lane)) bad = std::min(bad, r);
      }
  *bad_row = bad;
}

// out: bf16 [rows, in] = outputs `ids` of the weight * scale, NaN for an id without a row. ids and out are contiguous.
void octavo_gather_blocks(const Linear* l, const int64_t* ids, int64_t rows, float scale, void* out,
                          int32_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (rows > 1 && num_threads > 1) schedule(static)
  for (int64_t r = 0; r < rows; r++) {
    BFloat16* to = static_cast<BFloat16*>(out) + r * l->in;
    if (ids[r] >= 0 && ids[r] < l->out)
      gather(*l, ids[r], scale, to);
    else
      for (int64_t i = 0; i < l->in; i++) to[i].bits = 0x7fc0;
  }
}

}  // extern "C"
