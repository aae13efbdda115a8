#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>

namespace airside {

// What a full block holds and everything before it: 128 bits, chained block by block. Two contents
// have the same key by accident about once in 2^64 blocks that are alive together, which is never.
// It is no cryptographic hash: who can choose tokens freely might build two that collide, and is
// kept from other people's blocks by the salt alone.
struct BlockKey {
  std::uint64_t hi = 0;
  std::uint64_t lo = 0;

  bool operator==(const BlockKey&) const = default;
};

// The key before the first block of a sequence.
BlockKey RootKey(std::string_view salt);

// The key of a block with these contents, one entry per token, that follows `before`.
BlockKey NextKey(BlockKey before, std::span<const std::uint64_t> contents);

}  // namespace airside

template <>
struct std::hash<airside::BlockKey> {
  std::size_t operator()(const airside::BlockKey& key) const noexcept {
    return static_cast<std::size_t>(key.lo);  // as well mixed as any function of it
  }
};
