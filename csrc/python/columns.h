#pragma once

#include <nanobind/nanobind.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

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

}  // namespace airside
