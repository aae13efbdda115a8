#pragma once

#include <cstdint>

#include "kernels/cpu/types.h"

// How one block of one KV head lies in the cache: head_dim x block_size elements of keys, and as
// many of values, in the order that paged_attention multiplies in. It is the same on every
// instruction set, and nobody but kv_cache_write and paged_attention knows it.
//
//   two-byte types  keys    [head_dim / 2][block_size][2]  pairs of elements of a key
//                   values  [block_size / 2][head_dim][2]  pairs of keys
//   float32         keys    [head_dim][block_size]
//                   values  [block_size][head_dim]
//
// A pair is what a dot-product instruction takes in one lane. Where the size to pair is odd, its
// last index has no partner and lies behind the pairs as in the layout of float32.
namespace airside::cpu::AIRSIDE_ISA {

template <typename T>
inline constexpr int64_t kPair = sizeof(T) == 2 ? 2 : 1;

// Of element `pairing` of [size], paired, and element `other` of [others] beside it.
template <typename T>
int64_t paired_index(int64_t pairing, int64_t size, int64_t other, int64_t others) {
  const int64_t first = pairing / kPair<T> * kPair<T>;
  if (first + kPair<T> > size) return first * others + other;
  return first * others + other * kPair<T> + (pairing - first);
}

template <typename T>
int64_t key_index(int64_t offset, int64_t block_size, int64_t d, int64_t head_dim) {
  return paired_index<T>(d, head_dim, offset, block_size);
}

template <typename T>
int64_t value_index(int64_t offset, int64_t block_size, int64_t d, int64_t head_dim) {
  return paired_index<T>(offset, block_size, d, head_dim);
}

}  // namespace airside::cpu::AIRSIDE_ISA
