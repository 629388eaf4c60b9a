// Paged attention on a CPU, for decode and prefill: writes K and V into blocks and attends over them. Plain C ABI.
//
// Layout. K block: [kv_heads][head_dim / n][block_size][n], V block: [kv_heads][block_size / n][padded_dim][n]. n is 1
// in fp32, and 2 in bf16, so that a vector holds a pair of dimensions of 16 keys, or a pair of keys of 16 dimensions.
// head_dim is rounded up to n with zeros, padded_dim is head_dim rounded up to 16.
// Work. A tile is a run of query tokens of one sequence; its rows are these tokens times the query heads that share a
// KV head. A thread processes a (tile, KV head), or one part of its keys, to balance threads: they are merged then.
// Numerics, at every level. Keys are divided into parts of 256 at fixed positions. Of a row and a part:
//   score = sum of q * k over the dimensions, in order, as in `pair_sums.h`; capped: tanh(score * scale / cap) * cap.
//   x = score * scale * log2(e), best = the maximum x, weight = 2^(x - best).
//   total = sum of the weights: 16 sums of every 16th key, of which halves are added to each other.
//   sums = sum of weight * v over the keys, from zero, in order, as in `pair_sums.h`; of weights in bf16 if V is.
// Parts are folded from left to right by `fold`, whichever thread does. At last: sums / total. A key that the row does
// not see has weight 0, which changes no sum. So a row's bits depend only on its own keys: not on the tile, the step,
// other sequences, or the number of threads. V of a key that no row of a tile sees is not read: it may be stale.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "buffer.h"
#include "pair_sums.h"

namespace {

#if defined(__AVX512F__)
constexpr int kRows = 6, kUnits = sizeof(PairSums::Element) == 2 ? 4 : 2;  // whose sums are kept in registers
#else
constexpr int kRows = kLanes == 8 ? 4 : 3, kUnits = 1;
#endif
constexpr int kTileRows = 64;   // rows of a tile; one token may have more
constexpr int kGroupRows = 12;  // rows whose scores of a part wait in the first cache
constexpr int kPartKeys = 256;  // a multiple of the block size
constexpr int kPartUnits = kPartKeys / kUnit;
constexpr float kLog2e = 1.4426950408889634f, kNever = -std::numeric_limits<float>::infinity();

// `Element`: the type of queries and weights, of which kPair are a factor.
template <typename T>
constexpr int kPair = std::is_same_v<T, BFloat16> ? 2 : 1;
template <typename T>
using Sums = std::conditional_t<kPair<T> == 2, PairSums, FloatSums>;
template <typename T>
using Element = typename Sums<T>::Element;

template <typename Reduce>
float reduce(const Vec* x, Reduce reduce_two) {
  float lanes[kUnit];
  std::memcpy(lanes, x, sizeof lanes);
  for (int n = kUnit / 2; n; n /= 2)
    for (int i = 0; i < n; i++) lanes[i] = reduce_two(lanes[i], lanes[i + n]);
  return lanes[0];
}

// scores[row][0..16 * Units) = q[row] . K. keys[u]: the first dimensions of 16 keys, the next ones a `stride` behind;
// ahead[u]: as many lines of 64 bytes, which are fetched meanwhile, or `ahead` is null.
template <typename T, int Rows, int Units>
void score(const Element<T>* q, int dim, const T* const* keys, int stride, float* scores, const T* const* ahead) {
  constexpr int n = kPair<T>;
  Sums<T> sums[Rows][Units];
  for (int d = 0; d < dim / n; d++) {
    for (int u = 0; ahead && u < Units; u++) __builtin_prefetch(ahead[u] + d * (64 / sizeof(T)));
#pragma GCC unroll 6
    for (int r = 0; r < Rows; r++) {
      const auto factor = Sums<T>::factor(q + r * dim + d * n);
#pragma GCC unroll 4
      for (int u = 0; u < Units; u++) sums[r][u].add(keys[u] + d * stride, factor);
    }
  }
  for (int r = 0; r < Rows; r++)
    for (int u = 0; u < Units; u++) sums[r][u].save(scores + r * kPartKeys + u * kUnit);
}

// out[row][0..16 * Units) = weights[row] . V over the keys [begin, end) of a part, of the dimensions from `first` on.
// values[i]: 16 keys. If only one key of a pair is inside, the other is read as zero. ahead[i]: as many lines of 64
// bytes, `stride` apart, or `ahead` is null.
template <typename T, int Rows, int Units>
void weigh(const Element<T>* weights, int begin, int end, const T* const* values, int first, int wide, float* out,
           const T* const* ahead, int stride) {
  constexpr int n = kPair<T>, kPairs = kUnit / n;
  Sums<T> sums[Rows][Units];
  auto add = [&](const T* value, int pair) {
#pragma GCC unroll 6
    for (int r = 0; r < Rows; r++) {
      const auto factor = Sums<T>::factor(weights + r * kPartKeys + pair * n);
#pragma GCC unroll 4
      for (int u = 0; u < Units; u++) sums[r][u].add(value + u * kUnit * n, factor);
    }
  };
  auto value_at = [&](int pair) { return values[pair / kPairs] + (pair % kPairs * wide + first) * n; };
  auto add_one = [&](int key) {
    T pairs[Units * kUnit * n] = {};
    for (int i = key % n; i < Units * kUnit * n; i += n) pairs[i] = value_at(key / n)[i];
    add(pairs, key / n);
  };
  if (begin % n) add_one(begin);
  const int last = end / n;
  for (int p = (begin + n - 1) / n; p < last;) {
    const int unit = p / kPairs, stop = std::min((unit + 1) * kPairs, last);
    int64_t line = first / kUnit * kPairs + p % kPairs * Units;
    for (const T* value = value_at(p); p < stop; p++, value += wide * n, line += Units) {
      for (int u = 0; ahead && u < Units; u++) __builtin_prefetch(ahead[unit] + (line + u) * stride);
      add(value, p);
    }
  }
  if (end % n) add_one(end - 1);
  for (int r = 0; r < Rows; r++)
    for (int u = 0; u < Units; u++) sums[r][u].save(out + r * wide + u * kUnit);
}

template <typename T>
struct Products {
  decltype(&score<T, 1, 1>) scores[kRows][kUnits];
  decltype(&weigh<T, 1, 1>) weighs[kRows][kUnits];
};
template <typename T, int... i>
constexpr Products<T> all_products(std::integer_sequence<int, i...>) {
  return {{score<T, i / kUnits + 1, i % kUnits + 1>...}, {weigh<T, i / kUnits + 1, i % kUnits + 1>...}};
}
template <typename T>
constexpr Products<T> kProducts = all_products<T>(std::make_integer_sequence<int, kRows * kUnits>{});

int round_up(int x, int to) { return (x + to - 1) / to * to; }

}  // namespace

extern "C" {

struct Tile {
  int32_t seq, token_row, position, num_queries, key_begin, key_end, partial, unused;
};

struct Merge {
  int32_t token_row, num_queries, first_partial, num_partials;
};

// One layer: its blocks and its shape. It changes only when the cache is allocated.
struct Layer {
  void* keys;
  void* values;
  int32_t kv_heads, group, head_dim, block_size, window, is_bfloat16;
  float scale, softcap;  // scale: positive
};

// One step, for layers of one shape. The caller rewrites it before each step.
struct Step {
  const int64_t* slots;   // [tokens]
  const int32_t* tables;  // [seqs, table_stride]
  const Tile* tiles;
  const Merge* merges;
  float* partials;  // of a tile with partial >= 0, from row `partial` on: [kv_heads, rows of the tile, 2 + padded_dim]
  int64_t table_stride, num_tiles, num_merges;
  int32_t num_threads;
};

}  // extern "C"

namespace {

struct Attention : Layer, Step {
  const void* q;
  int64_t q_stride;
  void* out;  // [tokens, heads, head_dim], contiguous
  int wide() const { return round_up(head_dim, kUnit); }
  float* partial(int64_t first_row, int rows, int head, int row) const {
    return partials + (first_row * kv_heads + head * rows + row) * (2 + wide());
  }
};

// The result of some parts of a row: the maximum, the total of the weights 2^(x - best), and `sums` of the values.
struct State {
  float best = kNever, total = 0;
};

// Adds the next part to those before it: the smaller maximum's times 2^(difference), plus the other's.
void fold(State& state, float* sums, State part, const float* part_sums, int wide) {
  if (part.total == 0) return;  // the row sees no key of the part
  const bool is_larger = part.best > state.best;
  const float weight = exp2_vec(splat(is_larger ? state.best - part.best : part.best - state.best))[0];
  const float *smaller = is_larger ? sums : part_sums, *larger = is_larger ? part_sums : sums;
  for (int d = 0; d < wide; d += kLanes) store(sums + d, load(smaller + d) * weight + load(larger + d));
  state.total = is_larger ? state.total * weight + part.total : part.total * weight + state.total;
  state.best = std::max(state.best, part.best);
}

// Turns the scores of the keys [begin, end) of a part, which the row sees, into weights, 0 for others of [skip, width).
template <typename T>
State soften(const Layer& l, float* scores, Element<T>* weights, int begin, int end, int skip, int width) {
  const int low = begin / kUnit * kUnit, high = round_up(end, kUnit);
  if (low > skip || high < width || end <= begin) std::fill(weights + skip, weights + width, Element<T>{});
  if (end <= begin) return {};
  IntVec lanes;
  for (int i = 0; i < kLanes; i++) lanes[i] = i;
  Vec top[kUnit / kLanes], sum[kUnit / kLanes] = {};
  std::fill_n(top, kUnit / kLanes, splat(kNever));
  for (int i = low; i < high; i += kLanes) {
    Vec x = load(scores + i);
    if (l.softcap > 0) x = tanh_vec(x * l.scale / l.softcap) * (l.softcap * kLog2e);
    const IntVec key = lanes + i;
    if (i < begin || i + kLanes > end) x = (key >= begin) & (key < end) ? x : splat(kNever);
    store(scores + i, x);
    Vec& best = top[i / kLanes % (kUnit / kLanes)];
    best = x > best ? x : best;
  }
  const float factor = l.softcap > 0 ? 1.0f : l.scale * kLog2e;
  const float best = reduce(top, [](float a, float b) { return std::max(a, b); }) * factor;
  for (int i = low; i < high; i += kLanes) {
    const Vec weight = exp2_vec(load(scores + i) * factor - best);
    Sums<T>::store_elements(weights + i, weight);
    sum[i / kLanes % (kUnit / kLanes)] += weight;
  }
  return {best, reduce(sum, [](float a, float b) { return a + b; })};
}

// The blocks of a sequence and KV head, by units of 16 keys.
template <typename T>
struct Keys {
  Keys(const Attention& a, const Tile& tile, int head)
      : table(a.tables + tile.seq * a.table_stride), size(a.block_size), wide(a.wide()), kv_heads(a.kv_heads) {
    dim = round_up(a.head_dim, kPair<T>);
    keys = static_cast<const T*>(a.keys) + int64_t(head) * dim * size;
    values = static_cast<const T*>(a.values) + int64_t(head) * wide * size;
  }
  int64_t block(int at) const { return int64_t(table[at / size]) * kv_heads * size; }
  const T* key(int at) const { return keys + block(at) * dim + at % size * kPair<T>; }
  const T* value(int at) const { return values + (block(at) + at % size) * wide; }
  const int32_t* table;
  const T *keys, *values;
  int size, wide, kv_heads, dim;
};

template <typename T>
struct Workspace {
  alignas(64) float scores[kGroupRows * kPartKeys];
  alignas(64) Element<T> weights[kGroupRows * kPartKeys];
  State parts[kGroupRows];
  Buffer<float> part, sums;  // [kGroupRows][wide], [rows of the tile][wide]
  Buffer<State> states;      // [rows of the tile]
  Buffer<Element<T>> q;      // [rows of the tile][dim]
};

// Returns the queries of a tile, of which dimensions that are only in the layout are 0.
template <typename T>
Element<T>* queries_of(const Attention& a, const Tile& tile, int head, int rows, int dim, Workspace<T>& w) {
  Element<T>* q = w.q.reserve(size_t(rows * dim));
  for (int r = 0; r < rows; r++) {
    const T* from = static_cast<const T*>(a.q) + (tile.token_row + r / a.group) * a.q_stride +
                    int64_t(head * a.group + r % a.group) * a.head_dim;
    for (int d = 0; d < dim; d++) from_float(d < a.head_dim ? to_float(from[d]) : 0.0f, q + r * dim + d);
  }
  return q;
}

// Adds the keys of the tile to `w.states` and `w.sums`. `next`: probably the next item of this thread.
template <typename T>
void attend_tile(const Attention& a, const Tile& tile, int head, const Tile& next, int next_head, Workspace<T>& w) {
  const Keys<T> blocks(a, tile, head), later(a, next, next_head);
  const int rows = tile.num_queries * a.group, wide = blocks.wide, dim = blocks.dim, stride = a.block_size * kPair<T>;
  const Element<T>* q = queries_of(a, tile, head, rows, dim, w);
  float *sums = w.sums.reserve(size_t(rows * wide)), *part = w.part.reserve(size_t(kGroupRows * wide));
  State* states = w.states.reserve(size_t(rows));
  std::fill_n(sums, rows * wide, 0.0f);
  std::fill_n(states, rows, State{});
  for (int first = tile.key_begin / kPartKeys * kPartKeys; first < tile.key_end; first += kPartKeys) {
    const int count = std::min(kPartKeys, tile.key_end - first), units = (count + kUnit - 1) / kUnit;
    const int skip = std::max(0, tile.key_begin - first) / kUnit;  // units before the window
    const T *keys[kPartUnits], *values[kPartUnits], *ahead[kPartUnits];
    for (int i = skip, later_key = next.key_begin; i < units; i++) {
      const int key = first + i * kUnit;
      keys[i] = blocks.key(key), values[i] = blocks.value(key);
      if (key + kPartKeys < tile.key_end) {
        ahead[i] = blocks.key(key + kPartKeys);
      } else {
        ahead[i] = later.key(std::min(later_key, next.key_end - 1) / kUnit * kUnit);
        later_key += kUnit;
      }
    }
    for (int row = 0; row < rows; row += kGroupRows) {
      const int group_rows = std::min(kGroupRows, rows - row);
      for (int i = skip; i < units; i += kUnits)
        for (int r = 0; r < group_rows; r += kRows)
          kProducts<T>.scores[std::min(kRows, group_rows - r) - 1][std::min(kUnits, units - i) - 1](
              q + (row + r) * dim, dim, keys + i, stride, w.scores + r * kPartKeys + i * kUnit,
              row + r == 0 ? values + i : nullptr);
      int least = kPartKeys, most = 0;
      for (int r = 0; r < group_rows; r++) {
        const int position = tile.position + (row + r) / a.group - first, end = std::min(position + 1, count);
        const int begin = std::max({0, tile.key_begin - first, a.window > 0 ? position + 1 - a.window : 0});
        if (begin < end) least = std::min(least, begin), most = std::max(most, end);
        w.parts[r] = soften<T>(a, w.scores + r * kPartKeys, w.weights + r * kPartKeys, begin, end, skip * kUnit,
                               units * kUnit);
      }
      if (most == 0) continue;
      for (int d = 0; d < wide; d += kUnits * kUnit)
        for (int r = 0; r < group_rows; r += kRows)
          kProducts<T>.weighs[std::min(kRows, group_rows - r) - 1][std::min(kUnits, (wide - d) / kUnit) - 1](
              w.weights + r * kPartKeys, least, most, values, d, wide, part + r * wide + d,
              row + r == 0 ? ahead : nullptr, stride);
      for (int r = 0; r < group_rows; r++)
        fold(states[row + r], sums + (row + r) * wide, w.parts[r], part + r * wide, wide);
    }
  }
}

template <typename T>
void finish_row(const Attention& a, int token_row, int row, int head, const float* sums, float total) {
  int64_t at = (int64_t(token_row + row / a.group) * a.kv_heads + head) * a.group + row % a.group;
  T* out = static_cast<T*>(a.out) + at * a.head_dim;
  for (int d = 0; d < a.head_dim; d += kLanes) store_up_to(out + d, load(sums + d) / total, a.head_dim - d);
}

template <typename T>
void store_tile(const Attention& a, const Tile& tile, int head, Workspace<T>& w) {
  const int rows = tile.num_queries * a.group, wide = a.wide();
  const State* states = w.states.reserve(size_t(rows));
  for (int r = 0; r < rows; r++) {
    const float* sums = w.sums.reserve(size_t(rows * wide)) + r * wide;
    if (tile.partial < 0) {
      finish_row<T>(a, tile.token_row, r, head, sums, states[r].total);
    } else {
      float* p = a.partial(tile.partial, rows, head, r);
      p[0] = states[r].best, p[1] = states[r].total;
      std::copy(sums, sums + wide, p + 2);
    }
  }
}

template <typename T>
void merge_parts(const Attention& a, const Merge& merge, int head, Workspace<T>& w) {
  const int wide = a.wide(), rows = merge.num_queries * a.group;
  float* sums = w.sums.reserve(size_t(wide));
  for (int r = 0; r < rows; r++) {
    State state;
    std::fill_n(sums, wide, 0.0f);
    for (int64_t i = 0; i < merge.num_partials; i++) {
      const float* p = a.partial(merge.first_partial + i * rows, rows, head, r);
      fold(state, sums, {p[0], p[1]}, p + 2, wide);
    }
    finish_row<T>(a, merge.token_row, r, head, sums, state.total);
  }
}

template <typename T>
void attend(const Attention& a) {
  const int64_t items = a.num_tiles * a.kv_heads, merges = a.num_merges * a.kv_heads;
#pragma omp parallel num_threads(a.num_threads) if (items > 1 && a.num_threads > 1)
  {
    static thread_local Workspace<T> w;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < items; i++) {
      const int64_t n = std::min(i + 1, items - 1);
      const Tile& tile = a.tiles[i / a.kv_heads];
      attend_tile(a, tile, int(i % a.kv_heads), a.tiles[n / a.kv_heads], int(n % a.kv_heads), w);
      store_tile(a, tile, int(i % a.kv_heads), w);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < merges; i++) merge_parts(a, a.merges[i / a.kv_heads], int(i % a.kv_heads), w);
  }
}

template <typename T>
void write(const Layer& l, const Step& s, const T* k, const T* v, int64_t k_stride, int64_t v_stride, int64_t tokens) {
  constexpr int n = kPair<T>;
  const int dim = round_up(l.head_dim, n), size = l.block_size, wide = round_up(l.head_dim, kUnit);
#pragma omp parallel for schedule(static) num_threads(s.num_threads) if (tokens > 2048 && s.num_threads > 1)
  for (int64_t t = 0; t < tokens; t++) {
    if (s.slots[t] < 0) continue;
    const int64_t block = s.slots[t] / size, offset = s.slots[t] % size;
    for (int h = 0; h < l.kv_heads; h++) {
      const T *key = k + t * k_stride + h * l.head_dim, *value = v + t * v_stride + h * l.head_dim;
      T* keys = static_cast<T*>(l.keys) + (block * l.kv_heads + h) * dim * size + offset * n;
      T* values = static_cast<T*>(l.values) + ((block * l.kv_heads + h) * size + offset / n * n) * wide;
      for (int d = 0; d < dim; d++) keys[d / n * size * n + d % n] = d < l.head_dim ? key[d] : T{};
      for (int d = 0; d < l.head_dim; d++) values[d * n + offset % n] = value[d];
    }
  }
}

}  // namespace

extern "C" {

int32_t octavo_tile_rows() { return kTileRows; }

// q: [tokens, heads, head_dim] and k, v: [tokens, kv_heads, head_dim], tokens a stride apart; out: like q, contiguous.
void octavo_attend(const Layer* l, const Step* s, const void* q, int64_t q_stride, void* out) {
  Attention a{*l, *s, q, q_stride, out};
  l->is_bfloat16 ? attend<BFloat16>(a) : attend<float>(a);
}
void octavo_write(const Layer* l, const Step* s, const void* k, const void* v, int64_t k_stride, int64_t v_stride,
                  int64_t tokens) {
  l->is_bfloat16 ? write(*l, *s, (const BFloat16*)k, (const BFloat16*)v, k_stride, v_stride, tokens)
                 : write(*l, *s, (const float*)k, (const float*)v, k_stride, v_stride, tokens);
}

}  // extern "C"
