// Memory that a thread keeps between calls.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>

namespace {

// A buffer of the calling thread that grows and is kept: steps of equal size do not allocate.
template <typename T>
class Buffer {
 public:
  T* reserve(size_t count) {
    if (count > size_) memory_.reset(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64)));
    size_ = std::max(size_, count);
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> memory_;
  size_t size_ = 0;
};

}  // namespace
