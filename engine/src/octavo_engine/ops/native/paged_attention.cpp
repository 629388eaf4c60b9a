// Paged attention on a CPU, for decode and prefill: writes K and V into blocks and attends over them. Plain C ABI.
//
// Layout. K block: [kv_heads, head_dim, block_size], so that one vector holds one dimension of several keys. V block:
// [kv_heads, block_size, padded_dim]; padded_dim is head_dim rounded up to whole vectors.
// Work. A tile is a run of query tokens of one sequence; its rows are these tokens times the query heads that share a
// KV head. A thread processes a (tile, KV head), or one part of its keys, to balance threads: the tiles are merged then.
// Numerics. Keys are divided into parts of kPartKeys at fixed positions. A row's part has its own maximum, and its sums
// begin with zero and add keys in order. `fold` adds the parts from left to right, whichever thread does. Keys that a row
// does not see add exactly 0. So a row's bits depend only on its own keys: not on the tile, the step or the threads.
// Keys at or after a tile's `key_end` are never read from V, and their scores are replaced: stale contents are harmless.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "vectors.h"

namespace {

#if defined(__AVX512F__)
constexpr int kScoreRows = 12, kValueRows = 6;
#else
constexpr int kScoreRows = 6, kValueRows = 3;
#endif
constexpr int kSplit = 2;           // partial sums of a score; one number for all rows, so that rows do not affect bits
constexpr int kValueVectors = 4;    // vectors of one row that are accumulated in registers
constexpr int kTileRows = 64;       // rows of a tile; one token may have more
constexpr int kPartKeys = 256;      // keys with one maximum; a multiple of the block size
constexpr float kNever = -std::numeric_limits<float>::infinity();

// Returns a block as fp32: the block itself, or a copy in `buffer`, for tiles that read it more than once.
inline const float* widen(const float* source, int, float*) { return source; }
inline const float* widen(const BFloat16* source, int count, float* buffer) {
  for (int i = 0; i < count; i += kLanes) store(buffer + i, load(source + i));
  return buffer;
}

inline void prefetch(const void* address, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(address) + i);
}

// scores[row][0..block_size) = q[row] . K for Rows rows. Two partial sums hide latency with few rows.
template <typename T, int Rows>
void score_rows(const float* q, int q_stride, const T* k, int dim, int block_size, float* scores, int stride) {
  for (int key = 0; key < block_size; key += kLanes) {
    Vec sum[kSplit][Rows] = {};
    int d = 0;
    for (; d + kSplit <= dim; d += kSplit) {
#pragma GCC unroll 4
      for (int s = 0; s < kSplit; s++) {
        Vec keys = load(k + (d + s) * block_size + key);
#pragma GCC unroll 12
        for (int r = 0; r < Rows; r++) sum[s][r] += keys * q[r * q_stride + d + s];
      }
    }
    for (; d < dim; d++) {
      Vec keys = load(k + d * block_size + key);
#pragma GCC unroll 12
      for (int r = 0; r < Rows; r++) sum[0][r] += keys * q[r * q_stride + d];
    }
#pragma GCC unroll 12
    for (int r = 0; r < Rows; r++) {
      Vec total = sum[0][r];
#pragma GCC unroll 4
      for (int s = 1; s < kSplit; s++) total += sum[s][r];
      store(scores + r * stride + key, total);
    }
  }
}

// out[row] += weights[row] . V for Vectors vectors of Rows rows, `count` keys.
template <typename T, int Rows, int Vectors>
void add_values(const float* weights, int stride, const T* v, int dim, int count, float* out) {
  Vec sum[Rows][Vectors];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; j++) sum[r][j] = load(out + r * dim + j * kLanes);
  for (int t = 0; t < count; t++) {
    Vec values[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; j++) values[j] = load(v + t * dim + j * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; r++) {
      float weight = weights[r * stride + t];
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; j++) sum[r][j] += values[j] * weight;
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; j++) store(out + r * dim + j * kLanes, sum[r][j]);
}

template <typename T>
using ScoreRows = void (*)(const float*, int, const T*, int, int, float*, int);
template <typename T>
using AddValues = void (*)(const float*, int, const T*, int, int, float*);

template <typename T, int... I>
constexpr std::array<ScoreRows<T>, sizeof...(I)> score_table(std::integer_sequence<int, I...>) {
  return {score_rows<T, I + 1>...};
}
template <typename T, int... I>
constexpr std::array<AddValues<T>, sizeof...(I)> value_table(std::integer_sequence<int, I...>) {
  return {add_values<T, I / kValueVectors + 1, I % kValueVectors + 1>...};
}
template <typename T>
constexpr auto kScore = score_table<T>(std::make_integer_sequence<int, kScoreRows>{});
template <typename T>
constexpr auto kValue = value_table<T>(std::make_integer_sequence<int, kValueRows * kValueVectors>{});

template <typename T>
void score_block(const float* q, int rows, const T* k, int dim, int block_size, float* scores) {
  for (int r = 0; r < rows; r += kScoreRows) {
    int count = std::min(kScoreRows, rows - r);
    kScore<T>[count - 1](q + r * dim, dim, k, dim, block_size, scores + r * kPartKeys, kPartKeys);
  }
}

template <typename T>
void value_block(const float* weights, int rows, const T* v, int dim, int count, float* out) {
  for (int r = 0; r < rows; r += kValueRows) {
    int num_rows = std::min(kValueRows, rows - r);
    for (int d = 0; d < dim; d += kValueVectors * kLanes) {
      int vectors = std::min(kValueVectors, (dim - d) / kLanes);
      AddValues<T> add = kValue<T>[(num_rows - 1) * kValueVectors + vectors - 1];
      add(weights + r * kPartKeys, kPartKeys, v + d, dim, count, out + r * dim + d);
    }
  }
}

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
  float scale, softcap;
};

// One step, for layers of one shape. The caller rewrites it before each step.
struct Step {
  const int64_t* slots;   // [tokens]
  const int32_t* tables;  // [seqs, table_stride]
  const Tile* tiles;
  const Merge* merges;
  float* partials;  // of the tiles with partial >= 0, from row `partial` on: [kv_heads, rows of the tile, 2 + padded_dim]
  int64_t table_stride, num_tiles, num_merges;
  int32_t num_threads;
};

}  // extern "C"

namespace {

struct Attention : Layer, Step {
  const void* q;
  int64_t q_stride;
  void* out;  // [tokens, heads, head_dim], contiguous
};

int padded(int dim) { return (dim + kLanes - 1) / kLanes * kLanes; }
int max_rows(const Attention& a) { return std::max(kTileRows, a.group); }
float* partial_of(const Attention& a, int64_t first_row, int rows, int head, int row) {
  return a.partials + (first_row * a.kv_heads + head * rows + row) * (2 + padded(a.head_dim));
}

// The result of some parts of a row: the maximum, the total of the weights e^(score - best), and `sums` of the values.
struct State {
  float best, total;
};

// Adds the next part to those before it. The smaller maximum's weight is at most 1, the larger one's is 1.
void fold(State& state, float* sums, State part, const float* part_sums, int dim) {
  if (part.total == 0) return;  // the row sees no key of the part
  if (part.best > state.best) {
    float weight = std::exp(state.best - part.best);
    state = {part.best, state.total * weight + part.total};
    for (int d = 0; d < dim; d += kLanes) store(sums + d, load(sums + d) * weight + load(part_sums + d));
  } else {
    float weight = std::exp(part.best - state.best);
    state.total += part.total * weight;
    for (int d = 0; d < dim; d += kLanes) store(sums + d, load(part_sums + d) * weight + load(sums + d));
  }
}

struct Workspace {
  explicit Workspace(const Attention& a)
      : dim(padded(a.head_dim)),
        q(max_rows(a) * a.head_dim),
        scores(max_rows(a) * kPartKeys),
        part(max_rows(a) * dim),
        sums(max_rows(a) * dim),
        block(a.block_size * dim),
        states(max_rows(a)),
        parts(max_rows(a)) {}
  int dim;
  std::vector<float> q, scores, part, sums, block;
  std::vector<State> states, parts;
};

// Caps and masks the scores of the part's keys [skip, count), the first of which is `first_key`, and stores the weights.
void soften(const Attention& a, const Tile& tile, int rows, int first_key, int skip, int count, Workspace& w) {
  for (int r = 0; r < rows; r++) {
    float* s = w.scores.data() + r * kPartKeys;
    int position = tile.position + r / a.group;
    int end = std::min(position + 1 - first_key, count);
    int begin = a.window > 0 ? std::max(0, position + 1 - a.window - first_key) : 0;
    int low = begin / kLanes * kLanes, high = (end + kLanes - 1) / kLanes * kLanes;
    if (end <= begin) {
      std::fill(s + skip, s + count, 0.0f);
      w.parts[r] = {kNever, 0.0f};
      continue;
    }
    Vec top = splat(kNever);
    for (int i = low; i < high; i += kLanes) {
      Vec x = load(s + i);
      if (a.softcap > 0) x = tanh_vec(x / a.softcap) * a.softcap;
      if (i < begin || i + kLanes > end)
        for (int j = 0; j < kLanes; j++)
          if (i + j < begin || i + j >= end) x[j] = kNever;
      store(s + i, x);
      top = x > top ? x : top;
    }
    float best = max_of(top);
    Vec sum{};
    for (int i = low; i < high; i += kLanes) {
      Vec e = exp_vec(load(s + i) - best);
      store(s + i, e);
      sum += e;
    }
    if (skip < low) std::fill(s + skip, s + low, 0.0f);
    if (high < count) std::fill(s + high, s + count, 0.0f);
    w.parts[r] = {best, sum_of(sum)};
  }
}

template <typename T>
void attend_tile(const Attention& a, const Tile& tile, int head, Workspace& w) {
  const int rows = tile.num_queries * a.group, dim = a.head_dim, block_size = a.block_size;
  const int64_t k_block = int64_t(a.kv_heads) * dim * block_size, v_block = int64_t(a.kv_heads) * block_size * w.dim;
  const T* keys = static_cast<const T*>(a.keys) + int64_t(head) * dim * block_size;
  const T* values = static_cast<const T*>(a.values) + int64_t(head) * block_size * w.dim;
  const int32_t* table = a.tables + tile.seq * a.table_stride;

  for (int i = 0; i < tile.num_queries; i++) {
    const T* q = static_cast<const T*>(a.q) + (tile.token_row + i) * a.q_stride + int64_t(head) * a.group * dim;
    for (int j = 0; j < a.group * dim; j++) w.q[i * a.group * dim + j] = to_float(q[j]) * a.scale;
  }
  std::fill_n(w.sums.begin(), rows * w.dim, 0.0f);
  std::fill_n(w.states.begin(), rows, State{kNever, 0.0f});

  for (int first = tile.key_begin / kPartKeys * kPartKeys; first < tile.key_end; first += kPartKeys) {
    int count = std::min(kPartKeys, tile.key_end - first);
    int skip = std::max(0, tile.key_begin - first) / block_size * block_size;  // keys of blocks before the window
    for (int key = skip; key < count; key += block_size) {
      const T* block = keys + table[(first + key) / block_size] * k_block;
      if (first + key + block_size < tile.key_end)
        prefetch(keys + table[(first + key) / block_size + 1] * k_block, dim * block_size * sizeof(T));
      float* scores = w.scores.data() + key;
      if (rows <= kScoreRows) {
        score_block(w.q.data(), rows, block, dim, block_size, scores);
      } else {
        score_block(w.q.data(), rows, widen(block, dim * block_size, w.block.data()), dim, block_size, scores);
      }
    }
    soften(a, tile, rows, first, skip, count, w);
    std::fill_n(w.part.begin(), rows * w.dim, 0.0f);
    for (int key = skip; key < count; key += block_size) {
      const T* block = values + table[(first + key) / block_size] * v_block;
      if (key + block_size < count)
        prefetch(values + table[(first + key) / block_size + 1] * v_block, block_size * w.dim * sizeof(T));
      int valid = std::min(block_size, count - key);
      const float* weights = w.scores.data() + key;
      if (rows <= kValueRows) {
        value_block(weights, rows, block, w.dim, valid, w.part.data());
      } else {
        value_block(weights, rows, widen(block, valid * w.dim, w.block.data()), w.dim, valid, w.part.data());
      }
    }
    for (int r = 0; r < rows; r++) fold(w.states[r], &w.sums[r * w.dim], w.parts[r], &w.part[r * w.dim], w.dim);
  }
}

template <typename T>
void finish_row(const Attention& a, int token_row, int row, int head, const float* sum, float total) {
  int64_t at = (int64_t(token_row + row / a.group) * a.kv_heads + head) * a.group + row % a.group;
  T* out = static_cast<T*>(a.out) + at * a.head_dim;
  for (int d = 0; d < a.head_dim; d++) from_float(sum[d] / total, out + d);
}

template <typename T>
void store_tile(const Attention& a, const Tile& tile, int head, const Workspace& w) {
  int rows = tile.num_queries * a.group;
  for (int r = 0; r < rows; r++) {
    const float* sums = w.sums.data() + r * w.dim;
    if (tile.partial < 0) {
      finish_row<T>(a, tile.token_row, r, head, sums, w.states[r].total);
    } else {
      float* p = partial_of(a, tile.partial, rows, head, r);
      p[0] = w.states[r].best;
      p[1] = w.states[r].total;
      std::copy(sums, sums + w.dim, p + 2);
    }
  }
}

template <typename T>
void merge_parts(const Attention& a, const Merge& merge, int head) {
  const int dim = padded(a.head_dim), rows = merge.num_queries * a.group;
  std::vector<float> sums(dim);
  for (int r = 0; r < rows; r++) {
    State state{kNever, 0.0f};
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t i = 0; i < merge.num_partials; i++) {
      const float* p = partial_of(a, merge.first_partial + i * rows, rows, head, r);
      fold(state, sums.data(), {p[0], p[1]}, p + 2, dim);
    }
    finish_row<T>(a, merge.token_row, r, head, sums.data(), state.total);
  }
}

template <typename T>
void attend(const Attention& a) {
  const int64_t items = a.num_tiles * a.kv_heads, merges = a.num_merges * a.kv_heads;
#pragma omp parallel num_threads(a.num_threads) if (items > 1 && a.num_threads > 1)
  {
    Workspace w(a);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < items; i++) {
      attend_tile<T>(a, a.tiles[i / a.kv_heads], int(i % a.kv_heads), w);
      store_tile<T>(a, a.tiles[i / a.kv_heads], int(i % a.kv_heads), w);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < merges; i++) merge_parts<T>(a, a.merges[i / a.kv_heads], int(i % a.kv_heads));
  }
}

template <typename T>
void write(const Layer& l, const Step& s, const T* k, const T* v, int64_t k_stride, int64_t v_stride, int64_t tokens) {
  const int dim = l.head_dim, block_size = l.block_size, wide = padded(dim);
#pragma omp parallel for schedule(static) num_threads(s.num_threads) if (tokens > 2048 && s.num_threads > 1)
  for (int64_t t = 0; t < tokens; t++) {
    if (s.slots[t] < 0) continue;
    int64_t block = s.slots[t] / block_size, offset = s.slots[t] % block_size;
    T* keys = static_cast<T*>(l.keys) + block * l.kv_heads * dim * block_size + offset;
    T* values = static_cast<T*>(l.values) + (block * l.kv_heads * block_size + offset) * wide;
    for (int h = 0; h < l.kv_heads; h++) {
      const T *key = k + t * k_stride + h * dim, *value = v + t * v_stride + h * dim;
      for (int d = 0; d < dim; d++) keys[(int64_t(h) * dim + d) * block_size] = key[d];
      std::copy(value, value + dim, values + int64_t(h) * block_size * wide);
    }
  }
}

}  // namespace

extern "C" {

int32_t octavo_lanes() { return kLanes; }
int32_t octavo_tile_rows() { return kTileRows; }
int32_t octavo_part_keys() { return kPartKeys; }

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
