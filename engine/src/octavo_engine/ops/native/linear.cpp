// Linear layers of bf16 inputs for any number of rows, limited by memory bandwidth for few rows: one thread reads each
// weight once for some rows. Plain C ABI; `panels.h` describes the weight.
//
// Work. Each thread computes a run of panels of 32 outputs, so threads never share an output.
// Numerics. Sums are in fp32, in an order that depends only on the number of inputs; then the bias is added. They are
// rounded once, or not at all if `out` is fp32. An output's bits depend neither on other rows nor on the number of
// threads. The inner product of weights in blocks is in `linear_blocks.h`. For weights in bf16 the CPU's level selects it:
// by tiles here in `linear_tiles.h`, by vectors in `linear_vectors.h`.

#include <omp.h>

#include "linear_blocks.h"
#include "tiles.h"
#ifdef OCTAVO_TILES
#include "linear_tiles.h"
#else
#include "linear_vectors.h"
#endif

extern "C" {

// Applies the `count` parts of a layer, whose outputs are beside each other. x: bf16 [rows, in], rows `x_stride` apart.
// `result`: bf16 or fp32 [rows, outputs], or, of one gated part, bf16 [rows, out / 2] = activation(first half) * second
// half. out: contiguous.
void octavo_linear(const Linear* parts, int64_t count, const void* x, int64_t x_stride, int64_t rows, void* out,
                   int32_t result, int32_t activation, int32_t num_threads) {
  int64_t stride = 0;
  for (int64_t i = 0; i < count; i++) stride += result == kActivated ? parts[i].out / 2 : parts[i].out;
  Call call{static_cast<const BFloat16*>(x), x_stride, rows, out, stride, Result(result), activation, num_threads};
  if (parts->format != kBFloat16) return multiply_blocks(parts, count, call);
  for (int64_t i = 0; i < count; i++, call.out = next_part(call, parts[i - 1])) multiply(parts[i], call);
}

}  // extern "C"
