#include <atomic>
#include <string_view>

#include "kernels/cpu/kernels.h"

namespace airside::cpu {

namespace baseline {
extern const Kernels kTable;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kTable;
}
namespace avx512 {
extern const Kernels kTable;
}
namespace avx512_bf16 {
extern const Kernels kTable;
}
#endif

namespace {

bool supported([[maybe_unused]] const Kernels& table) {
#if defined(__x86_64__)
  if (&table == &avx512_bf16::kTable) {
    return __builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avx512bf16") &&
           __builtin_cpu_supports("avx512vnni");
  }
  if (&table == &avx512::kTable) return __builtin_cpu_supports("x86-64-v4");
  if (&table == &avx2::kTable) return __builtin_cpu_supports("x86-64-v3");
#endif
  return true;
}

// Widest first.
const Kernels* const kTables[] = {
#if defined(__x86_64__)
    &avx512_bf16::kTable,
    &avx512::kTable,
    &avx2::kTable,
#endif
    &baseline::kTable,
};

const Kernels* widest() {
  for (const Kernels* table : kTables) {
    if (supported(*table)) return table;
  }
  return &baseline::kTable;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> table{widest()};
  return table;
}

}  // namespace

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

bool set_isa(const char* isa) {
  for (const Kernels* table : kTables) {
    if (std::string_view(table->isa) == isa && supported(*table)) {
      chosen().store(table, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

}  // namespace airside::cpu
