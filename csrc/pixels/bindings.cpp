// `airside._pixels`: checks of what Python hands over, then the work, without the GIL.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <sys/mman.h>

#include <string>

#include "pixels/pixels.h"

namespace nb = nanobind;

namespace airside::pixels {
namespace {

using Picture = nb::ndarray<const uint8_t, nb::ndim<3>, nb::device::cpu>;
using Levels =
    nb::ndarray<const float, nb::shape<kColours, kLevels>, nb::c_contig, nb::device::cpu>;
using Planes = nb::ndarray<float, nb::shape<kColours, -1, -1>, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::shape<-1, -1, kColours>, nb::c_contig, nb::device::cpu>;

void expect(bool holds, const char* otherwise) {
  if (!holds) throw nb::value_error(otherwise);
}

View view(const Picture& pixels) {
  const auto channels = static_cast<int64_t>(pixels.shape(2));
  expect(channels == kColours || channels == kColours + 1,
         "pixels must be [height, width, 3 or 4]");
  expect(pixels.shape(0) > 0 && pixels.shape(1) > 0, "pixels must not be empty");
  expect(pixels.stride(2) == 1 && pixels.stride(1) == channels,
         "the pixels of a row must lie side by side");
  return {.data = pixels.data(),
          .width = static_cast<int64_t>(pixels.shape(1)),
          .height = static_cast<int64_t>(pixels.shape(0)),
          .channels = channels,
          .row_bytes = pixels.stride(0)};
}

Filter filter_of(std::string_view name) {
  if (name == "bilinear") return Filter::kBilinear;
  if (name == "bicubic") return Filter::kBicubic;
  expect(name == "lanczos", "filter must be bilinear, bicubic or lanczos");
  return Filter::kLanczos;
}

void resize_bound(const Picture& pixels, std::string_view filter, bool columns_first,
                  const Bytes& out) {
  const View in = view(pixels);
  const Filter chosen = filter_of(filter);
  expect(out.shape(0) > 0 && out.shape(1) > 0, "out must not be empty");
  const nb::gil_scoped_release unlocked;
  resize(in, chosen, columns_first ? Order::kColumnsFirst : Order::kRowsFirst,
         static_cast<int64_t>(out.shape(1)), static_cast<int64_t>(out.shape(0)), out.data());
}

void spread_bound(const Picture& pixels, const Levels& levels, const Planes& out) {
  const View in = view(pixels);
  expect(out.shape(1) == pixels.shape(0) && out.shape(2) == pixels.shape(1),
         "out must be [3, height, width] of the pixels");
  expect(out.stride(2) == 1, "the values of a plane's row must lie side by side");
  const nb::gil_scoped_release unlocked;
  spread(in, levels.data(), out.data(), out.stride(0), out.stride(1));
}

// As the Arrow C data interface defines it.
struct ArrowArray {
  int64_t length;
  int64_t null_count;
  int64_t offset;
  int64_t n_buffers;
  int64_t n_children;
  const void** buffers;
  ArrowArray** children;
  ArrowArray* dictionary;
  void (*release)(ArrowArray*);
  void* private_data;
};

struct Memory {
  const uint8_t* data;
  size_t num_bytes;
};

// Of the array capsule that a Pillow image's core gives: pixels of four bytes, in one piece.
Memory memory_of(const nb::capsule& array) {
  expect(array.name() != nullptr && std::string_view(array.name()) == "arrow_array",
         "not a capsule of an Arrow array");
  const auto* pixels = static_cast<const ArrowArray*>(array.data());
  expect(pixels->release != nullptr && pixels->n_children == 1 && pixels->offset == 0,
         "not an Arrow array of pixels");
  const ArrowArray* bytes = pixels->children[0];
  expect(bytes->n_buffers == 2 && bytes->offset == 0 &&
             bytes->length == pixels->length * (kColours + 1),
         "not an Arrow array of pixels of four bytes");
  return {static_cast<const uint8_t*>(bytes->buffers[1]), static_cast<size_t>(bytes->length)};
}

nb::ndarray<nb::numpy, const uint8_t> arrow_pixels(const nb::capsule& array, size_t height,
                                                   size_t width) {
  constexpr size_t kBytes = kColours + 1;
  const Memory memory = memory_of(array);
  expect(memory.num_bytes == height * width * kBytes, "not as many pixels as that");
  return {memory.data, {height, width, kBytes}, array};
}

void prefer_huge_pages(const nb::capsule& array) {
  [[maybe_unused]] const Memory memory = memory_of(array);
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = 4096;
  const auto begin = (reinterpret_cast<uintptr_t>(memory.data) + kPage - 1) / kPage * kPage;
  const auto end = reinterpret_cast<uintptr_t>(memory.data) + memory.num_bytes;
  // Advice: a system that does not take it is a little slower.
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

void set_isa_bound(std::string_view isa) {
  expect(set_isa(isa), "this processor lacks that instruction set");
}

}  // namespace
}  // namespace airside::pixels

NB_MODULE(_pixels, m) {
  using namespace nb::literals;
  using namespace airside::pixels;
  m.doc() = "Resizing and normalising pictures. All of it releases the GIL.";
  m.def(
      "resize", &resize_bound, "pixels"_a, "filter"_a, "columns_first"_a, "out"_a.noconvert(),
      "Pillow's Image.resize of an RGB picture, byte for byte, into `out`: [height, width, 3].\n\n"
      "pixels: [h, w, 3 or 4] uint8; a fourth channel is not looked at.\n"
      "filter: bilinear, bicubic or lanczos.\n"
      "columns_first: the order of the two convolutions, which changes the result.");
  m.def("spread", &spread_bound, "pixels"_a, "levels"_a.noconvert(), "out"_a.noconvert(),
        "Writes levels[c, pixels[y, x, c]] to out[c, y, x]; levels: [3, 256] float32.");
  m.def("arrow_pixels", &arrow_pixels, "array"_a, "height"_a, "width"_a,
        "The pixels, [height, width, 4], of the array capsule that an image's __arrow_c_array__ "
        "gave; not a copy.");
  m.def("prefer_huge_pages", &prefer_huge_pages, "array"_a,
        "Advises the system on the memory behind such a capsule, before it is written to: a large "
        "picture then costs a few page faults instead of thousands.");
  m.def("set_isa", &set_isa_bound, "isa"_a,
        "Chooses `resize`'s instruction set: baseline, avx2 or avx512. ValueError: not here.");
}
