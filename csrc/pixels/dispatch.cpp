#include <atomic>

#include "pixels/isa.h"

namespace airside::pixels {

namespace baseline {
extern const Passes kPasses;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Passes kPasses;
}
namespace avx512 {
extern const Passes kPasses;
}
#endif

namespace {

bool supported([[maybe_unused]] const Passes& table) {
#if defined(__x86_64__)
  if (&table == &avx512::kPasses) return __builtin_cpu_supports("x86-64-v4");
  if (&table == &avx2::kPasses) return __builtin_cpu_supports("x86-64-v3");
#endif
  return true;
}

// Widest first.
const Passes* const kTables[] = {
#if defined(__x86_64__)
    &avx512::kPasses,
    &avx2::kPasses,
#endif
    &baseline::kPasses,
};

const Passes* widest() {
  for (const Passes* table : kTables) {
    if (supported(*table)) return table;
  }
  return &baseline::kPasses;
}

std::atomic<const Passes*>& chosen() {
  static std::atomic<const Passes*> table{widest()};
  return table;
}

}  // namespace

const Passes& passes() { return *chosen().load(std::memory_order_relaxed); }

bool set_isa(std::string_view isa) {
  for (const Passes* table : kTables) {
    if (table->isa == isa && supported(*table)) {
      chosen().store(table, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

}  // namespace airside::pixels
