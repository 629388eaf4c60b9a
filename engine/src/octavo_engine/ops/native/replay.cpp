// Makes recorded calls of kernels again, without Python between them.
//
// A kernel has up to 11 arguments that are numbers or pointers, and up to one float. The calling conventions of x86-64
// and AArch64 (Linux) give each of the former a register or a stack slot of 64 bits, whose upper half is undefined for
// an int32_t, and the latter a register of its own. A call may thus pass more arguments than the kernel has.

#include <cstdint>

extern "C" {

struct RecordedCall {
  void* kernel;
  int64_t arguments[11];
  float scale;
};

void octavo_replay(const RecordedCall* calls, int64_t count) {
  using I = int64_t;
  using Kernel = void (*)(I, I, I, I, I, I, I, I, I, I, I, float);
  for (int64_t i = 0; i < count; i++) {
    const int64_t* a = calls[i].arguments;
    reinterpret_cast<Kernel>(calls[i].kernel)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10],
                                              calls[i].scale);
  }
}

}  // extern "C"
