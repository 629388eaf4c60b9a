// Vectors of floats for all kernels, as wide as the CPU's registers; conversion of bf16 to and from fp32; exp, exp2, tanh.
//
// The code uses the compiler's vector extension, so that it is correct on any CPU and fast with AVX-512, AVX2 and NEON.
// All arithmetic is in fp32; bf16 is rounded to nearest, ties to even, and NaN stays NaN.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int16_t PairVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));  // twice as many lanes
typedef uint16_t HalfVec __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
typedef uint32_t BitVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

struct BFloat16 {
  uint16_t bits;
};

inline Vec splat(float x) { return x - Vec{}; }
inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline Vec load(const BFloat16* p) {
  BitVec bits = __builtin_convertvector(*reinterpret_cast<const HalfVec*>(p), BitVec) << 16;
  return *reinterpret_cast<Vec*>(&bits);
}
inline void store(float* p, Vec x) { *reinterpret_cast<Vec*>(p) = x; }

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline void from_float(float x, float* out) { *out = x; }
inline void from_float(float x, BFloat16* out) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  out->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void store(BFloat16* p, Vec x) {
  BitVec bits = *reinterpret_cast<BitVec*>(&x);
  bits = x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : BitVec{} + 0x7fc0;
  *reinterpret_cast<HalfVec*>(p) = __builtin_convertvector(bits, HalfVec);
}

// Load and store the last elements of a row, fewer than a vector; other lanes are read as zero and not written.
template <typename T>
Vec load_part(const T* p, int count) {
  T buffer[kLanes] = {};
  std::copy(p, p + count, buffer);
  return load(buffer);
}
template <typename T>
void store_part(T* p, Vec x, int count) {
  T buffer[kLanes];
  store(buffer, x);
  std::copy(buffer, buffer + count, p);
}
template <typename T>
Vec load_up_to(const T* p, int64_t count) {
  return count >= kLanes ? load(p) : load_part(p, int(count));
}
template <typename T>
void store_up_to(T* p, Vec x, int64_t count) {
  count >= kLanes ? store(p, x) : store_part(p, x, int(count));
}

// e^x for x <= 0 (and a little above); exactly 0 below -87, so that masked scores have weight 0.
inline Vec exp_vec(Vec x) {
  Vec clamped = x < -87.0f ? splat(-87.0f) : x;
  Vec shifted = clamped * 1.44269504089f + 12582912.0f;  // rounds to an integer in the low bits
  Vec n = shifted - 12582912.0f;
  Vec r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
  return x < -87.0f ? Vec{} : p * (Vec)exponent;
}

// 2^x for x <= 0; relative error 2e-7; 0 below -126.
inline Vec exp2_vec(Vec x) {
  Vec shifted = x + 12582912.0f, f = x - (shifted - 12582912.0f);  // rounds to an integer in the low bits
  Vec power = f * 1.3264727e-3f + 9.6715126e-3f;
  power = power * f + 5.5507337e-2f;
  power = power * f + 2.4022242e-1f;
  power = power * f + 6.9314698e-1f;
  power = power * f + 1.0f;
  IntVec bits = *reinterpret_cast<IntVec*>(&power) + (*reinterpret_cast<IntVec*>(&shifted) << 23);
  return x < -126.0f ? Vec{} : *reinterpret_cast<Vec*>(&bits);
}

inline Vec tanh_vec(Vec x) {
  Vec a = x < -9.0f ? splat(-9.0f) : (x > 9.0f ? splat(9.0f) : x);
  Vec e = exp_vec(a + a);
  return (e - 1.0f) / (e + 1.0f);
}

inline float max_of(Vec x) {
  float best = x[0];
  for (int i = 1; i < kLanes; i++) best = std::max(best, x[i]);
  return best;
}
inline float sum_of(Vec x) {
  float total = 0;
  for (int i = 0; i < kLanes; i++) total += x[i];
  return total;
}

}  // namespace
