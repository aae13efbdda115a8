#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

namespace airside {

// Writes the frame of a message as proto/codec.py does: a version byte, then a msgpack array of the
// message's kind and its fields. The columns of a step go into it as they are; through Python
// objects and a packer they would take several times as long.
class Frame {
 public:
  Frame(std::uint8_t version, std::size_t num_fields, std::uint32_t kind) {
    bytes_.push_back(static_cast<char>(version));
    AddHeader(0x90, 0x0F, 0xDC, 0xDD, num_fields + 1);
    Add(kind);
  }

  template <typename T>
    requires std::is_integral_v<T>
  void Add(T value) {
    // The widest forms, which every reader takes.
    if constexpr (std::is_signed_v<T>) {
      AddBigEndian(0xD3, static_cast<std::uint64_t>(static_cast<std::int64_t>(value)), 8);
    } else {
      AddBigEndian(0xCF, static_cast<std::uint64_t>(value), 8);
    }
  }

  template <typename T>
  void Add(const std::vector<T>& column) {
    const std::size_t size = column.size() * sizeof(T);
    AddBigEndian(0xC6, size, 4);
    bytes_.append(reinterpret_cast<const char*>(column.data()), size);
  }

  // Row -> ids.
  void Add(const std::map<std::int32_t, std::vector<std::int32_t>>& rows) {
    AddHeader(0x80, 0x0F, 0xDE, 0xDF, rows.size());
    for (const auto& [row, ids] : rows) {
      Add(row);
      AddHeader(0x90, 0x0F, 0xDC, 0xDD, ids.size());
      for (const std::int32_t id : ids) Add(id);
    }
  }

  // A field that is packed already.
  void AddPacked(const nanobind::bytes& packed) { bytes_.append(packed.c_str(), packed.size()); }

  nanobind::bytes ToBytes() const { return nanobind::bytes(bytes_.data(), bytes_.size()); }

 private:
  void AddBigEndian(std::uint8_t head, std::uint64_t value, int num_bytes) {
    bytes_.push_back(static_cast<char>(head));
    for (int shift = 8 * (num_bytes - 1); shift >= 0; shift -= 8) {
      bytes_.push_back(static_cast<char>(value >> shift));
    }
  }

  void AddHeader(std::uint8_t small, std::size_t small_max, std::uint8_t head16,
                 std::uint8_t head32, std::size_t size) {
    if (size <= small_max) {
      bytes_.push_back(static_cast<char>(small | size));
    } else if (size <= 0xFFFF) {
      AddBigEndian(head16, size, 2);
    } else {
      AddBigEndian(head32, size, 4);
    }
  }

  std::string bytes_;
};

}  // namespace airside
