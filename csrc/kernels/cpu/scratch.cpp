#include "kernels/cpu/scratch.h"

#include <memory>
#include <new>

namespace airside::cpu {
namespace {

constexpr std::align_val_t kAlignment{64};

#ifdef __SANITIZE_ADDRESS__
constexpr bool kNoSlack = true;  // what is used beyond what was asked for is to be noticed
#else
constexpr bool kNoSlack = false;
#endif

struct Free {
  void operator()(float* p) const { ::operator delete(p, kAlignment); }
};

struct Scratch {
  std::unique_ptr<float, Free> floats;
  int64_t capacity = 0;
};

float* at_least(Scratch& scratch, int64_t count) {
  if (scratch.capacity < count || (kNoSlack && scratch.capacity > count)) {
    scratch.floats.reset();
    scratch.capacity = 0;
    scratch.floats.reset(static_cast<float*>(::operator new(sizeof(float) * count, kAlignment)));
    scratch.capacity = count;
  }
  return scratch.floats.get();
}

}  // namespace

float* scratch_floats(int64_t count) {
  thread_local Scratch scratch;
  return at_least(scratch, count);
}

float* shared_scratch_floats(int64_t count) {
  thread_local Scratch scratch;
  return at_least(scratch, count);
}

}  // namespace airside::cpu
