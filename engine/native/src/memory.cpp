#include "memory.h"

#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "arrays.h"

namespace mlxcel {

namespace {

size_t padded(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

void ask_for_huge_pages(char* from, size_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kHuge = 2 << 20;
  uintptr_t first = (uintptr_t(from) + kHuge - 1) / kHuge * kHuge, last = (uintptr_t(from) + bytes) / kHuge * kHuge;
  // A kernel that refuses leaves the pages small, which is only slower.
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace

std::vector<mx::array> lay_together(const std::vector<mx::array>& arrays) {
  size_t total = kAlignment;
  for (const mx::array& array : arrays) {
    expect(array.is_available() && array.flags().row_contiguous, "only evaluated, dense arrays are laid together");
    total += padded(array.nbytes());
  }
  mx::array buffer(mx::Shape{int(total / kAlignment), int(kAlignment)}, mx::uint8, nullptr, {});
  buffer.set_data(mx::allocator::malloc(total));
  char* base = buffer.data<char>();
  ask_for_huge_pages(base, total);
  size_t at = aligned(base) - base;
  std::vector<mx::array> laid;
  for (const mx::array& array : arrays) {
    std::memcpy(base + at, array.data<char>(), array.nbytes());
    mx::array copy(array.shape(), array.dtype(), nullptr, {});
    int64_t offset = int64_t(at / array.itemsize());
    copy.copy_shared_buffer(buffer, array.strides(), array.flags(), array.data_size(), offset);
    copy.set_status(mx::array::Status::available);
    laid.push_back(std::move(copy));
    at += padded(array.nbytes());
  }
  return laid;
}

}  // namespace mlxcel
