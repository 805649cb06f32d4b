// One buffer for everything that a recorded step computes on the way: what is no longer read makes room.
#pragma once

#include <algorithm>
#include <climits>
#include <map>
#include <vector>

#include "arrays.h"

namespace mlxcel {

// Used twice with the same calls in the same order: first it only learns from when until when each piece is needed,
// `plan` then places the pieces, and the second time they come out of one buffer, which is zero.
class Arena {
 public:
  // Memory that is written at `level` for the first time. The result shares it.
  void take(mx::array& array, int level) { take(array, level, array.nbytes()); }

  // The same for memory that is more than the array says.
  void take(mx::array& array, int level, size_t bytes) {
    bytes = (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
    if (buffer_) {
      const Piece& piece = pieces_[next_++];
      mx::Strides strides = array.strides();
      int64_t at = int64_t((aligned(start_) - start_ + piece.offset) / array.itemsize());
      array.copy_shared_buffer(*buffer_, strides, {true, true, array.ndim() <= 1}, array.size(), at);
    } else {
      array.set_data(mx::allocator::malloc(bytes));
      std::memset(array.data<char>(), 0, bytes);
      by_address_[array.data<char>()] = pieces_.size();
      pieces_.push_back({level, level, bytes, 0});
    }
    array.set_status(mx::array::Status::available);
  }

  // What lies at `address` is read or written at `level`, if it is one of the pieces.
  void use(const void* address, int level) {
    auto after = by_address_.upper_bound(static_cast<const char*>(address));
    if (after == by_address_.begin()) return;
    auto [from, number] = *std::prev(after);
    Piece& piece = pieces_[number];
    if (static_cast<const char*>(address) < from + piece.bytes) piece.until = std::max(piece.until, level);
  }

  void keep(const void* address) { use(address, INT_MAX); }

  void plan() {
    std::vector<Piece*> order, live;
    for (Piece& piece : pieces_) order.push_back(&piece);
    std::stable_sort(order.begin(), order.end(), [](Piece* a, Piece* b) { return a->from < b->from; });
    size_t total = 0;
    for (Piece* piece : order) {
      std::erase_if(live, [&](Piece* other) { return other->until < piece->from; });
      size_t offset = 0, place = 0;
      for (; place < live.size(); place++) {  // in the order of their offsets
        if (offset + piece->bytes <= live[place]->offset) break;
        offset = live[place]->offset + live[place]->bytes;
      }
      piece->offset = offset;
      live.insert(live.begin() + place, piece);
      total = std::max(total, offset + piece->bytes);
    }
    mx::Shape shape{int(total / kAlignment + 1), int(kAlignment)};
    buffer_.emplace(shape, mx::uint8, nullptr, std::vector<mx::array>{});
    std::memset(allocate(*buffer_), 0, buffer_->nbytes());
    start_ = buffer_->data<char>();
    buffer_->set_status(mx::array::Status::available);
    by_address_.clear();
    next_ = 0;
  }

 private:
  struct Piece {
    int from, until;  // levels
    size_t bytes, offset;
  };

  std::vector<Piece> pieces_;
  std::map<const char*, size_t> by_address_;
  std::optional<mx::array> buffer_;
  char* start_ = nullptr;
  size_t next_ = 0;
};

}  // namespace mlxcel
