// Token masks of one bit per token, applied to logits in place. See token_bitmask.py.

#include <cstdint>
#include <limits>

namespace {

constexpr int kBits = 32;
constexpr float kNever = -std::numeric_limits<float>::infinity();

// Masks up to 32 logits by one word; returns 1 if any kept logit is above -inf.
inline int32_t keep(float* x, uint32_t word, int count) {
  int32_t found = 0;
  for (int i = 0; i < count; i++) {
    float kept = (word >> i) & 1 ? x[i] : kNever;
    x[i] = kept;
    found |= kept > kNever;
  }
  return found;
}

bool keep_row(float* x, const uint32_t* words, int64_t size) {
  int32_t found = 0;
  const int64_t whole = size / kBits;
  for (int64_t w = 0; w < whole; w++) {
    if (words[w]) {
      found |= keep(x + w * kBits, words[w], kBits);
    } else {
      for (int i = 0; i < kBits; i++) x[w * kBits + i] = kNever;
    }
  }
  if (whole * kBits < size) found |= keep(x + whole * kBits, words[whole], int(size - whole * kBits));
  return found;
}

}  // namespace

extern "C" {

// logits: fp32, rows `stride` apart; row rows[i] is masked by words[i * num_words ..].
void octavo_apply_token_bitmask(float* logits, int64_t stride, int64_t vocab, const int64_t* rows, int64_t num_rows,
                        const uint32_t* words, int64_t num_words, bool* has_token, int32_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1 && num_rows > 1)
  for (int64_t i = 0; i < num_rows; i++)
    has_token[i] = keep_row(logits + rows[i] * stride, words + i * num_words, vocab);
}

}  // extern "C"
