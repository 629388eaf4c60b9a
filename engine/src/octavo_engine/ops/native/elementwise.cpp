// RMS norm (with an optional residual addition first), rotary embedding, gated activation and the gathering of rows, on
// rows of fp32 or bf16.
//
// Rows are contiguous inside and lie `stride` elements apart; callers own all memory. Sums are in fp32, in an order that
// depends only on the row's length. The calling thread computes few rows alone: a parallel region would cost more.

#include <cmath>

#include "activation_functions.h"
#include "vectors.h"

namespace {

constexpr int64_t kParallelElements = 1 << 15;

template <typename F>
void for_rows(int64_t rows, int64_t size, int num_threads, const F& row) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1 && rows * size > kParallelElements)
  for (int64_t r = 0; r < rows; r++) row(r);
}

template <typename T>
float sum_of_squares(const T* x, int64_t size) {
  Vec sum{};
  for (int64_t i = 0; i < size; i += kLanes) {
    Vec v = load_up_to(x + i, size - i);
    sum += v * v;
  }
  return sum_of(sum);
}

template <typename T>
void add_into(T* x, const T* update, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes)
    store_up_to(x + i, load_up_to(x + i, size - i) + load_up_to(update + i, size - i), size - i);
}

template <typename T>
void norm_row(const T* x, const float* gain, float floor_squared, int64_t size, T* out) {
  float scale = 1.0f / std::sqrt(sum_of_squares(x, size) + floor_squared);
  for (int64_t i = 0; i < size; i += kLanes)
    store_up_to(out + i, load_up_to(x + i, size - i) * load_up_to(gain + i, size - i) * scale, size - i);
}

template <typename T>
void rotate_head(T* x, const T* cos, const T* sin, int half) {
  for (int i = 0; i < half; i += kLanes) {
    int count = half - i;
    Vec a = load_up_to(x + i, count), b = load_up_to(x + half + i, count);
    Vec left = a * load_up_to(cos + i, count) + b * load_up_to(sin + i, count);
    Vec right = b * load_up_to(cos + half + i, count) + a * load_up_to(sin + half + i, count);
    store_up_to(x + i, left, count);
    store_up_to(x + half + i, right, count);
  }
}

}  // namespace

extern "C" {

// The parameters of one norm layer. gain: fp32 [heads, size].
struct Norm {
  const float* gain;
  int64_t heads, size;
  float floor_squared;
};

}  // extern "C"

namespace {

template <typename T>
void norm(const Norm& n, T* x, int64_t x_stride, const T* update, int64_t rows, T* out, int num_threads) {
  const int64_t width = n.heads * n.size;
  for_rows(rows, width, num_threads, [&](int64_t r) {
    if (update) add_into(x + r * x_stride, update + r * width, width);
    for (int64_t h = 0; h < width; h += n.size)
      norm_row(x + r * x_stride + h, n.gain + h, n.floor_squared, n.size, out + r * width + h);
  });
}

template <typename T>
void rotate(T* x, int64_t x_stride, int64_t rows, int64_t heads, int64_t head_dim, const T* cos, const T* sin,
            int64_t table_stride, int64_t rotary_dim, int num_threads) {
  for_rows(rows, heads * head_dim, num_threads, [&](int64_t r) {
    for (int64_t h = 0; h < heads; h++)
      rotate_head(x + r * x_stride + h * head_dim, cos + r * table_stride, sin + r * table_stride, int(rotary_dim / 2));
  });
}

template <typename T>
void gate(const T* x, int64_t x_stride, int64_t rows, int64_t size, T* out, int32_t activation, int num_threads) {
  for_rows(rows, 2 * size, num_threads, [&](int64_t r) {
    const T* row = x + r * x_stride;
    for (int64_t i = 0; i < size; i += kLanes) {
      int64_t count = size - i;
      Vec result = gated<T>(load_up_to(row + i, count), load_up_to(row + size + i, count), activation);
      store_up_to(out + r * size + i, result, count);
    }
  });
}

template <typename T>
void gather(const T* table, int64_t table_rows, int64_t size, int64_t first, int64_t all_rows, const int64_t* ids,
            int64_t rows, float scale, T* out, int num_threads) {
  for_rows(rows, size, num_threads, [&](int64_t r) {
    T* to = out + r * size;
    const int64_t row = ids[r] - first;
    if (row < 0 || row >= table_rows) {
      const float value = ids[r] >= 0 && ids[r] < all_rows ? 0.0f : std::nanf("");
      for (int64_t i = 0; i < size; i++) from_float(value, to + i);
      return;
    }
    const T* from = table + row * size;
    if (scale == 1.0f) {
      std::copy(from, from + size, to);
      return;
    }
    for (int64_t i = 0; i < size; i += kLanes) store_up_to(to + i, load_up_to(from + i, size - i) * scale, size - i);
  });
}

using Half = BFloat16;

}  // namespace

extern "C" {

// x: [rows, heads, size], rows `x_stride` apart; out: the same shape, contiguous. If `update` is not null, it is
// contiguous and is first added to x, the residual stream.
void octavo_norm(const Norm* n, void* x, int64_t x_stride, const void* update, int64_t rows, void* out,
                 int32_t is_bfloat16, int32_t num_threads) {
  is_bfloat16 ? norm(*n, (Half*)x, x_stride, (const Half*)update, rows, (Half*)out, num_threads)
              : norm(*n, (float*)x, x_stride, (const float*)update, rows, (float*)out, num_threads);
}

// x: [rows, heads, head_dim], changed in place; cos, sin: [rows, rotary_dim] of x's type, with a signed sine.
void octavo_rotate(void* x, int64_t x_stride, int64_t rows, int64_t heads, int64_t head_dim, const void* cos,
                   const void* sin, int64_t table_stride, int64_t rotary_dim, int32_t is_bfloat16,
                   int32_t num_threads) {
  is_bfloat16 ? rotate((Half*)x, x_stride, rows, heads, head_dim, (const Half*)cos, (const Half*)sin, table_stride,
                       rotary_dim, num_threads)
              : rotate((float*)x, x_stride, rows, heads, head_dim, (const float*)cos, (const float*)sin, table_stride,
                       rotary_dim, num_threads);
}

// x: [rows, 2 * size], gate before up; out: [rows, size], contiguous.
void octavo_gate(const void* x, int64_t x_stride, int64_t rows, int64_t size, void* out, int32_t activation,
                 int32_t is_bfloat16, int32_t num_threads) {
  is_bfloat16 ? gate((const Half*)x, x_stride, rows, size, (Half*)out, activation, num_threads)
              : gate((const float*)x, x_stride, rows, size, (float*)out, activation, num_threads);
}

// table: [table_rows, size], the rows from `first` of a table of `all_rows`; out: [rows, size] = rows `ids` * scale, 0
// for a row that is not in `table`, NaN for an id without a row. All are contiguous.
void octavo_gather(const void* table, int64_t table_rows, int64_t size, int64_t first, int64_t all_rows,
                   const int64_t* ids, int64_t rows, float scale, void* out, int32_t is_bfloat16, int32_t num_threads) {
  is_bfloat16
      ? gather((const Half*)table, table_rows, size, first, all_rows, ids, rows, scale, (Half*)out, num_threads)
      : gather((const float*)table, table_rows, size, first, all_rows, ids, rows, scale, (float*)out, num_threads);
}

}  // extern "C"
