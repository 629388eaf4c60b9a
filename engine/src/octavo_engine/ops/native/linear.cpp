// Linear layers in bf16 for any number of rows, limited by memory bandwidth for few rows: one thread reads each weight
// once for some rows. Plain C ABI; `panels.h` describes the weight.
//
// Work. Each thread computes a run of panels of 32 outputs, so threads never share an output.
// Numerics. Sums are in fp32, in an order that depends only on the number of inputs; then the bias is added. They are
// rounded once, or not at all if `out` is fp32. An output's bits depend neither on other rows nor on the number of
// threads. The CPU's level selects the inner product: by tiles here in `linear_tiles.h`, by vectors in `linear_vectors.h`.

#include <omp.h>

#include "panels.h"
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
  uint8_t* to = static_cast<uint8_t*>(out);
  for (int64_t i = 0; i < count; i++) {
    const BFloat16* from = static_cast<const BFloat16*>(x);
    multiply(parts[i], {from, x_stride, rows, to, stride, Result(result), activation, num_threads});
    to += parts[i].out * (result == kFloat ? 4 : 2);
  }
}

}  // extern "C"
