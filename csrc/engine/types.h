#pragma once

#include <cstdint>

namespace airside {

// Ids are strong: the compiler refuses one where another is meant. They have the layout of their
// integer, so a column of them is the bytes that travel.
enum class SeqId : std::uint64_t {};
enum class BlockId : std::int32_t {};
enum class StepId : std::uint64_t {};
enum class ClientId : std::int64_t {};

using TokenId = std::int32_t;

// Unix time, or a duration; always told from outside.
using Seconds = double;

}  // namespace airside
