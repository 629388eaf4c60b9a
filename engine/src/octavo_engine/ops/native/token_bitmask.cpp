// Token masks of one bit per token, applied to logits in place. See token_bitmask.py.

#include <cstdint>
#include <limits>

namespace {

constexpr int kBits = 32;
constexpr float kNever = -std::numeric_limits<float>::infinity();

inline void keep(float* x, uint32_t word, int count) {
  for (int i = 0; i < count; i++) x[i] = (word >> i) & 1 ? x[i] : kNever;
}

void keep_row(float* x, const uint32_t* words, int64_t size) {
  const int64_t whole = size / kBits;
  for (int64_t w = 0; w < whole; w++) {
    if (words[w]) {
      keep(x + w * kBits, words[w], kBits);
    } else {
      for (int i = 0; i < kBits; i++) x[w * kBits + i] = kNever;
    }
  }
  if (whole * kBits < size) keep(x + whole * kBits, words[whole], int(size - whole * kBits));
}

}  // namespace

extern "C" {

// logits: fp32, rows `stride` apart; row rows[i] is masked by words[i * num_words ..].
void octavo_apply_token_bitmask(float* logits, int64_t stride, int64_t vocab, const int64_t* rows, int64_t num_rows,
                        const uint32_t* words, int64_t num_words, int32_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1 && num_rows > 1)
  for (int64_t i = 0; i < num_rows; i++)
    keep_row(logits + rows[i] * stride, words + i * num_words, vocab);
}

}  // extern "C"
