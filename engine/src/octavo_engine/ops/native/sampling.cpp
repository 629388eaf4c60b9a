// One token for each row of logits: greedy, or drawn after temperature, min-p, top-k and top-p. Ranks of tokens.
//
// docs/reference/sampling.md defines the result, sampling/draws.py computes the same with torch. A first pass keeps the
// maximum of each chunk of a row. The k-th largest maximum is a lower bound of the k-th largest logit, and chunks below
// a threshold are not read again. Weights are integers in floats, and contraction to FMA is off: so neither the order
// of a sum nor the CPU's level changes a result, and a row's token depends only on the row.

#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "vectors.h"

namespace {

constexpr int64_t kChunk = 128;
constexpr int kBuckets = 1024;
constexpr int64_t kRankBlock = 4096;
constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr float kWeightBits = 34;       // the weight of the largest logit is 2^34
constexpr float kLeastScaled = -24.5f;  // lower scaled logits have weight 0

typedef float HalfFloats __attribute__((vector_size(kLanes * 2)));
typedef double HalfDoubles __attribute__((vector_size(kLanes * 4)));

// One bit for each lane of a comparison's result.
inline uint32_t lanes_of(IntVec mask) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX__)
  return _mm256_movemask_ps((__m256)mask);
#else
  uint32_t lanes = 0;
  for (int lane = 0; lane < kLanes; lane++) lanes |= uint32_t(mask[lane] & 1) << lane;
  return lanes;
#endif
}

template <typename F>
void for_lanes(uint32_t lanes, const F& visit) {
  for (; lanes; lanes &= lanes - 1) visit(__builtin_ctz(lanes));
}

// Adds floats to a double per pair of lanes.
inline void add_to(HalfDoubles& sum, Vec x) {
  HalfFloats halves[2];
  std::memcpy(halves, &x, sizeof halves);
  sum += __builtin_convertvector(halves[0], HalfDoubles) + __builtin_convertvector(halves[1], HalfDoubles);
}

inline Vec load_logits(const float* x, int64_t count) {
  if (count >= kLanes) return load(x);
  Vec part = splat(kNever);
  for (int64_t i = 0; i < count; i++) part[i] = x[i];
  return part;
}

// 2^34 e^s, rounded to an integer, for s <= 0.
inline Vec weights(Vec s) {
  Vec t = s * 1.44269504f;
  t = t < -60.0f ? splat(-60.0f) : t;
  Vec n = (t + 12582912.0f) - 12582912.0f;  // to the nearest integer
  Vec f = t - n;
  Vec p = f * 0.0013264727f + 0.009671513f;
  p = p * f + 0.055507336f;
  p = p * f + 0.24022242f;
  p = p * f + 0.693147f;
  p = p * f + 1.0f;
  IntVec exponent = (__builtin_convertvector(n + kWeightBits, IntVec) + 127) << 23;
  Vec w = p * (Vec)exponent;
  return w < 8388608.0f ? (w + 8388608.0f) - 8388608.0f : w;  // floats from 2^23 on are integers
}

inline BitVec mix(BitVec x, uint32_t high) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15) ^ high) * 0x846ca68bu;
  return x ^ (x >> 16);
}

inline float gumbel(uint32_t bits) { return float(-std::log(-std::log((bits + 0.5) * 0x1p-32))); }

// Never less than the Gumbel noise of these bits, and near it where the noise is large: -ln(1 - u), with log2
// interpolated between powers of two.
inline Vec gumbel_bound(BitVec bits) {
  Vec v = __builtin_convertvector((IntVec)(~bits >> 8), Vec);
  return (151.0f * 0.6931472f + 0.001f) - __builtin_convertvector((IntVec)v, Vec) * (0.6931472f / 8388608.0f);
}

struct Parameters {
  uint64_t key;
  double top_p;
  float inverse_temperature;
  float least_scaled;  // min-p as a scaled logit
  int32_t top_k;       // 0 is off
  float temperature;   // 0 for greedy
};

// Buffers of one thread.
struct Buffers {
  std::vector<float> chunk_best, candidates;
  std::vector<double> masses;
};

class Row {
 public:
  Row(const float* logits, int64_t vocab, const Parameters& p, Buffers& buffers)
      : x_(logits), vocab_(vocab), p_(p), buffers_(buffers), scale_(p.inverse_temperature) {}

  int64_t choose() {
    if (!scan()) return -1;
    if (p_.temperature == 0) return first_best();
    float cut = p_.top_k > 0 && p_.top_k < vocab_ ? top_k_cut() : kNever;
    if (p_.top_p < 1) cut = top_p_cut(cut);
    return draw(cut);
  }

 private:
  // Finds the chunks' maxima; returns whether the row's is finite and no logit is NaN.
  bool scan() {
    buffers_.chunk_best.clear();
    best_ = kNever;
    IntVec unordered{};
    for (int64_t start = 0; start < vocab_; start += kChunk) {
      Vec top = splat(kNever);
      for (int64_t i = start; i < std::min(vocab_, start + kChunk); i += kLanes) {
        Vec x = load_logits(x_ + i, vocab_ - i);
        unordered |= x != x;
        top = x > top ? x : top;
      }
      buffers_.chunk_best.push_back(max_of(top));
      best_ = std::max(best_, buffers_.chunk_best.back());
    }
    return !lanes_of(unordered) && std::isfinite(best_);
  }

  int64_t first_best() const {
    int64_t i = 0;
    while (buffers_.chunk_best[i / kChunk] != best_) i += kChunk;
    while (x_[i] != best_) i++;
    return i;
  }

  Vec scaled(Vec x) const { return (x - best_) * scale_; }
  float scaled(float x) const { return (x - best_) * scale_; }

  // Visits (first id, logits) of the chunks that have a logit of at least `least`.
  template <typename F>
  void visit(float least, const F& each) const {
    for (int64_t start = 0; start < vocab_; start += kChunk) {
      if (buffers_.chunk_best[start / kChunk] < least) continue;
      for (int64_t i = start; i < std::min(vocab_, start + kChunk); i += kLanes)
        each(i, load_logits(x_ + i, vocab_ - i));
    }
  }

  // Collects the accepted logits; none of them is less than `least`.
  template <typename F>
  void collect(float least, const F& accepted) {
    buffers_.candidates.clear();
    visit(least, [&](int64_t, Vec x) {
      for_lanes(lanes_of(accepted(x)), [&](int lane) { buffers_.candidates.push_back(x[lane]); });
    });
  }

  float kth_largest(std::vector<float>& values) const {
    std::nth_element(values.begin(), values.begin() + (p_.top_k - 1), values.end(), std::greater<>());
    return values[p_.top_k - 1];
  }

  // The k-th largest logit.
  float top_k_cut() {
    float least = kNever;
    if (p_.top_k <= int64_t(buffers_.chunk_best.size())) {
      buffers_.candidates = buffers_.chunk_best;
      least = kth_largest(buffers_.candidates);
    }
    collect(least, [&](Vec x) { return x >= least; });
    return kth_largest(buffers_.candidates);
  }

  // The least logit v whose larger logits, among those that min-p and top-k kept, have less than top_p of the mass.
  float top_p_cut(float cut) {
    const double total = mass_of(cut), target = p_.top_p * total;
    // All tokens of less weight than (1 - top_p) * total / vocab together have less mass than 1 - top_p.
    const float least_weight = float(0.99 * (total - target) / double(vocab_));
    const float lowest = std::log(std::max(least_weight, 0.5f) * 0x1p-34f) - 0.01f;
    const float buckets_per_unit = (kBuckets - 1) / -lowest;
    auto bucket = [&](Vec s) { return __builtin_convertvector(s * -buckets_per_unit, IntVec); };
    auto inside = [&](Vec x, Vec s) { return (x >= cut) & (s >= p_.least_scaled) & (s >= lowest); };
    const float first_read = std::max(cut, best_ + (lowest - 0.01f) * p_.temperature);
    IntVec unused;  // one bucket more for each lane
    for (int lane = 0; lane < kLanes; lane++) unused[lane] = kBuckets + lane;
    std::vector<double>& masses = buffers_.masses;
    masses.assign(kBuckets + kLanes, 0.0);
    visit(first_read, [&](int64_t, Vec x) {
      Vec s = scaled(x);
      IntVec kept = inside(x, s);
      if (!lanes_of(kept)) return;
      float w[kLanes];
      int32_t at[kLanes];
      store(w, weights(s));
      IntVec buckets = kept ? bucket(s) : unused;
      std::memcpy(at, &buckets, sizeof at);
      for (int lane = 0; lane < kLanes; lane++) masses[at[lane]] += w[lane];
    });
    double above = 0;
    int last = 0;
    while (last < kBuckets - 1 && above + masses[last] < target) above += masses[last++];
    collect(first_read, [&](Vec x) {
      Vec s = scaled(x);
      return inside(x, s) & (bucket(s) == last);
    });
    return last_within(above, target);
  }

  double mass_of(float cut) const {
    HalfDoubles total{};
    const float least = std::max(cut, best_ + (kLeastScaled - 0.01f) * p_.temperature);
    visit(least, [&](int64_t, Vec x) {
      Vec s = scaled(x), w = weights(s);
      add_to(total, (x >= cut) & (s >= p_.least_scaled) ? w : Vec{});
    });
    double sum = 0;
    for (int lane = 0; lane < kLanes / 2; lane++) sum += total[lane];
    return sum;
  }

  // The last of the candidates, in descending order, before which less mass than `target` lies.
  float last_within(double above, double target) {
    std::vector<float>& values = buffers_.candidates;
    std::sort(values.begin(), values.end(), std::greater<>());
    float cut = best_;
    for (float value : values) {
      if (above >= target) break;
      cut = value;
      above += weights(splat(scaled(value)))[0];
    }
    return cut;
  }

  // The token with the largest sum of scaled logit and noise.
  int64_t draw(float cut) const {
    const uint32_t low = uint32_t(p_.key), high = uint32_t(p_.key >> 32);
    BitVec ids;
    for (int lane = 0; lane < kLanes; lane++) ids[lane] = lane;
    float best_sum = kNever;
    int64_t token = -1;
    visit(cut, [&](int64_t first, Vec x) {
      Vec s = scaled(x);
      BitVec bits = mix((ids + uint32_t(first)) * 0x9e3779b9u + low, high);
      IntVec open = (x >= cut) & (s >= p_.least_scaled) & (s + gumbel_bound(bits) >= best_sum);
      for_lanes(lanes_of(open), [&](int lane) {
        float sum = s[lane] + gumbel(bits[lane]);
        if (sum > best_sum) best_sum = sum, token = first + lane;
      });
    });
    return token;
  }

  const float* x_;
  const int64_t vocab_;
  const Parameters& p_;
  Buffers& buffers_;
  const float scale_;
  float best_ = kNever;
};

}  // namespace

extern "C" {

// logits: fp32 [rows, vocab], rows `stride` apart. tokens: int64 [rows]; -1 for a row with NaN or without a finite
// maximum.
void octavo_sample(const float* logits, int64_t stride, int64_t vocab, int64_t rows, const Parameters* parameters,
                   int64_t* tokens, int32_t num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && rows > 1)
  {
    Buffers buffers;
#pragma omp for schedule(dynamic)
    for (int64_t r = 0; r < rows; r++) tokens[r] = Row(logits + r * stride, vocab, parameters[r], buffers).choose();
  }
}

// ids, ranks: int64 [rows, count]. A rank is 1 for the largest logit of the row; of equal ones, the lowest id is first.
// A block of the row stays in the cache while all its ids are compared with it.
void octavo_ranks(const float* logits, int64_t stride, int64_t vocab, int64_t rows, const int64_t* ids, int64_t count,
                  int64_t* ranks, int32_t num_threads) {
  std::fill(ranks, ranks + rows * count, 0);
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && rows > 1)
  for (int64_t r = 0; r < rows; r++) {
    const float* row = logits + r * stride;
    for (int64_t start = 0; start < vocab; start += kRankBlock) {
      const float* x = row + start;
      const int64_t size = std::min(vocab - start, kRankBlock);
      for (int64_t i = r * count; i < (r + 1) * count; i++) {
        const float own = row[ids[i]];
        const int64_t after = std::max<int64_t>(0, std::min(ids[i] + 1 - start, size));
        int32_t first = 0;
        for (int64_t j = 0; j < after; j++) first += x[j] >= own;
        for (int64_t j = after; j < size; j++) first += x[j] > own;
        ranks[i] += first;
      }
    }
  }
}

}  // extern "C"
