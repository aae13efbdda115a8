#pragma once

#include <nanobind/nanobind.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/request.h"

namespace airside {

// Columns travel as the little-endian bytes that they are.
template <typename T>
nanobind::bytes ToBytes(const std::vector<T>& column) {
  return nanobind::bytes(column.data(), column.size() * sizeof(T));
}

// Throws std::invalid_argument when the bytes are no whole number of entries.
template <typename T>
std::vector<T> FromBytes(const nanobind::bytes& bytes) {
  if (bytes.size() % sizeof(T) != 0) {
    throw std::invalid_argument(std::to_string(bytes.size()) + " bytes are no whole number of " +
                                std::to_string(sizeof(T)) + "-byte entries");
  }
  std::vector<T> column(bytes.size() / sizeof(T));
  if (!column.empty()) std::memcpy(column.data(), bytes.data(), bytes.size());
  return column;
}

// No bytes are no hash. Throws std::invalid_argument for any other number than a hash has.
inline std::optional<ImageHash> ToHash(const nanobind::bytes& bytes) {
  if (bytes.size() == 0) return std::nullopt;
  ImageHash hash;
  if (bytes.size() != hash.size()) {
    throw std::invalid_argument("an image hash has " + std::to_string(bytes.size()) +
                                " bytes, but must have " + std::to_string(hash.size()));
  }
  std::memcpy(hash.data(), bytes.data(), hash.size());
  return hash;
}

}  // namespace airside
