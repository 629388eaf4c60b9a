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

// Copies an fp16 number to those of all outputs, which are at `to`; returns false if it is not finite.
inline bool copy_fp16(const uint8_t* number, uint8_t* to, int lane) {
  std::memcpy(to + 2 * lane, number, 2);
  return (number[1] & 0x7c) != 0x7c;
}

inline uint32_t load_word(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

// The sizes in the file: of a block, which is a group of a K type, and of the numbers before its quants.
constexpr int file_bytes(Format f) {
  return !is_k_type(f) ? block_bytes(f) : kGroupSteps * quant_bytes(f) + (f == kQ6_K ? 18 : 16);
}
constexpr int header_bytes(Format f) { return f == kQ6_K ? 0 : is_k_type(f) ? 16 : has_minima(f) ? 4 : 2; }

// Quants i to i + 3 of step `s` of a block, in four bytes.
template <Format f>
uint32_t quants_of(const uint8_t* block, int s, int i) {
  constexpr uint32_t kOnes = 0x01010101u;
  const uint8_t* quants = block + header_bytes(f);
  if (f == kQ8_0) return load_word(quants + i) ^ 0x80 * kOnes;
  if (f == kQ6_K) {
    const uint8_t* high = quants + 4 * kStep + s / 4 * kStep;
    uint32_t low = load_word(quants + s / 4 * 2 * kStep + s % 2 * kStep + i) >> (s % 4 / 2 * 4);
    return (low & 15 * kOnes) | (load_word(high + i) >> (s % 4 * 2) & 3 * kOnes) << 4;
  }
  const uint8_t* low = quants + high_bits(f) * 4;
  if (!is_k_type(f)) {
    uint32_t result = load_word(low + i % 16) >> (i / 16 * 4) & 15 * kOnes;
    if (high_bits(f)) result |= ((load_word(quants) >> i & 15) * 0x00204081u & kOnes) << 4;  // bit k goes to byte k
    return result;
  }
  low = quants + high_bits(f) * kStep + s / 2 * kStep;
  uint32_t result = load_word(low + i) >> (s % 2 * 4) & 15 * kOnes;
  if (high_bits(f)) result |= (load_word(quants + i) >> s & kOnes) << 4;
  return result;
}

template <Format f>
void copy_quants(const uint8_t* block, int s, uint8_t* step, int lane) {
  constexpr int kHigh = high_bits(f);
  uint32_t words[quant_bytes(f) / 4] = {};
  for (int j = 0; j < kStep * low_bits(f) / 32; j++) {
    const uint32_t first = quants_of<f>(block, s, 4 * j);
    if (low_bits(f) == 8) {
      words[j] = first;
      continue;
    }
    const uint32_t second = quants_of<f>(block, s, 4 * j + 16), mask = 0x01010101u * ((1u << kHigh) - 1);
    words[j] = (first & 0x0f0f0f0fu) | (second & 0x0f0f0f0fu) << 4;
    if (kHigh) words[4 + kHigh * j / 4] |= ((first >> 4 & mask) | (second >> 4 & mask) << 4) << (kHigh * j % 4);
  }
  uint8_t* to = step + lane / kUnit * kUnit * quant_bytes(f) + lane % kUnit * 4;
  for (int j = 0; j < quant_bytes(f) / 4; j++) std::memcpy(to + 4 * kUnit * j, &words[j], 4);
}

// Copies the two bytes of step `s` of a block of a K type.
template <Format f>
void copy_bytes(const uint8_t* block, int s, uint8_t* numbers, int lane) {
  const uint8_t* bytes = block + (f == kQ6_K ? 6 * kStep + 2 * s : 4);
  uint8_t first = bytes[0], second = bytes[1];
  if (f != kQ6_K && s < 4) first = bytes[s] & 63, second = bytes[s + 4] & 63;
  if (f != kQ6_K && s >= 4) {
    first = uint8_t((bytes[s + 4] & 15) | (bytes[s - 4] >> 2 & 48));
    second = uint8_t(bytes[s + 4] >> 4 | (bytes[s] >> 2 & 48));
  }
  numbers[lane] = first;
  numbers[kPanel + lane] = second;
}

// Copies step `s` of a block; returns false if a number is not finite.
template <Format f>
bool copy_step(const uint8_t* block, int s, uint8_t* step, int lane) {
  uint8_t* numbers = step + kPanel * quant_bytes(f);
  copy_quants<f>(block, s, step, lane);
  if (is_k_type(f)) {
    copy_bytes<f>(block, s, numbers, lane);
    if (s > 0) return true;
    numbers = step - kPanel * factor_bytes(f);
  }
  const bool is_finite = copy_fp16(block + (f == kQ6_K ? file_bytes(f) - 2 : 0), numbers, lane);
  return has_minima(f) ? copy_fp16(block + 2, numbers + 2 * kPanel, lane) && is_finite : is_finite;
}

void gather(const Linear& l, int64_t id, float scale, BFloat16* out) {
  const Place place = place_of(l, id);
  for (int64_t s = 0; s < steps_of(l); s++, out += kStep) {
    kExpandStep[l.format](l.weight, place.panel * steps_of(l) + s, place.lane, out);
    for (int i = 0; i < kStep; i++) from_float(to_float(out[i]) * scale, out + i);
  }
}

// Copies rows of blocks to outputs from `first`; returns the first row with a number that is not finite, or `rows`.
template <Format f>
int64_t pack_rows(const Linear& l, uint8_t* panels, const uint8_t* blocks, int64_t first, int64_t rows, int threads) {
  constexpr int kSteps = is_k_type(f) ? kGroupSteps : 1;  // of a block in the file
  const int64_t steps = steps_of(l), groups = (rows + kUnit - 1) / kUnit;
  int64_t bad = rows;
#pragma omp parallel for num_threads(threads) reduction(min : bad) schedule(static)
  for (int64_t g = 0; g < groups; g++)
    for (int64_t s = 0; s < steps; s++)
      for (int64_t r = g * kUnit; r < std::min(rows, (g + 1) * kUnit); r++) {
        const Place place = place_of(l, first + r);
        uint8_t* step = panels + step_offset(f, place.panel * steps + s);
        const uint8_t* block = blocks + (r * steps + s) / kSteps * file_bytes(f);
        if (!copy_step<f>(block, int(s % kSteps), step, place.lane)) bad = std::min(bad, r);
      }
  return bad;
}

using PackRows = int64_t (*)(const Linear&, uint8_t*, const uint8_t*, int64_t, int64_t, int);
constexpr PackRows kPackers[] = {
    nullptr,          pack_rows<kQ8_0>, pack_rows<kQ4_0>, pack_rows<kQ4_1>, pack_rows<kQ5_0>,
    pack_rows<kQ5_1>, pack_rows<kQ4_K>, pack_rows<kQ5_K>, pack_rows<kQ6_K>};

}  // namespace

extern "C" {

// Copies outputs [first, first + rows) into the panels. blocks: [rows, in / 32], of K types [rows, in / 256] blocks of
// `format` as in a GGUF file. Sets `bad_row` to the first row with an infinite or NaN number; `rows` if there is none.
void octavo_pack_blocks(const Linear* l, const uint8_t* blocks, int64_t first, int64_t rows, int64_t* bad_row,
                        int32_t num_threads) {
  *bad_row = kPackers[l->format](*l, const_cast<uint8_t*>(l->weight), blocks, first, rows, num_threads);
}

// out: bf16 [rows, in] = outputs `ids` * scale of a weight of `all_rows`, of which l has those from `first`; 0 for an
// output that l does not have, NaN for an id without a row. ids and out are contiguous.
void octavo_gather_blocks(const Linear* l, int64_t first, int64_t all_rows, const int64_t* ids, int64_t rows,
                          float scale, void* out, int32_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (rows > 1 && num_threads > 1) schedule(static)
  for (int64_t r = 0; r < rows; r++) {
    BFloat16* to = static_cast<BFloat16*>(out) + r * l->in;
    const int64_t row = ids[r] - first;
    if (row >= 0 && row < l->out)
      gather(*l, row, scale, to);
    else
      for (int64_t i = 0; i < l->in; i++) to[i].bits = ids[r] >= 0 && ids[r] < all_rows ? 0 : 0x7fc0;
  }
}

}  // extern "C"
