#include "kernels/cpu/isa.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/vector.h"

namespace airside::cpu::AIRSIDE_ISA {
namespace {

// Rotates the pairs (head[i], head[i + half]) of one vector of i in `num_heads` heads. Each product
// is rounded to T before the sum, as it is where a framework multiplies and adds whole tensors of
// T.
template <typename T>
void rotate_heads(T* heads, int64_t num_heads, int64_t half, int64_t i, Floats cos, Floats sin) {
  const int64_t left = half - i;
  for (int64_t head = 0; head < num_heads; ++head) {
    T* first = heads + head * 2 * half + i;
    T* second = first + half;
    const Floats a = load_first(first, left);
    const Floats b = load_first(second, left);
    store_first(first, rounded<T>(a * cos) - rounded<T>(b * sin), left);
    store_first(second, rounded<T>(b * cos) + rounded<T>(a * sin), left);
  }
}

template <typename T>
void rotate_tokens(const RotaryEmbedding& args, int64_t begin, int64_t end) {
  const int64_t half = args.head_dim / 2;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t angles = args.positions[token] * half;
    T* q = static_cast<T*>(args.q) + token * args.q_stride;
    T* k = static_cast<T*>(args.k) + token * args.k_stride;
    for (int64_t i = 0; i < half; i += kLanes) {
      const Floats cos = rounded<T>(load_first(args.cos + angles + i, half - i));
      const Floats sin = rounded<T>(load_first(args.sin + angles + i, half - i));
      rotate_heads(q, args.num_heads, half, i, cos, sin);
      rotate_heads(k, args.num_kv_heads, half, i, cos, sin);
    }
  }
}

}  // namespace

void rotary_embedding(DType dtype, const RotaryEmbedding& args) {
  const int64_t cost_each = (args.num_heads + args.num_kv_heads) * args.head_dim;
  visit(dtype, [&]<typename T>(T*) {
    parallel_for(args.num_tokens, cost_each,
                 [&](int64_t begin, int64_t end) { rotate_tokens<T>(args, begin, end); });
  });
}

}  // namespace airside::cpu::AIRSIDE_ISA
