// What products with weights share: weights checked and as the kernels read them, rows laid out, columns cut into tasks.
#pragma once

#include <optional>

#include "work.h"

namespace mlxcel {

// Whole numbers that choose rows or experts, as they were given.
struct Indices {
  const void* data;
  mx::Dtype dtype;

  explicit Indices(const mx::array& indices) : data(indices.data<char>()), dtype(indices.dtype()) {}

  // `indices` in a type that is read.
  static mx::array readable(const mx::array& indices, mx::Stream stream) {
    bool as_is = indices.dtype() == mx::uint32 || indices.dtype() == mx::int32 || indices.dtype() == mx::int64;
    return as_is ? indices : mx::astype(indices, mx::int64, stream);
  }

  int64_t at(int64_t offset) const {
    return dtype == mx::uint32  ? static_cast<const uint32_t*>(data)[offset]
           : dtype == mx::int32 ? static_cast<const int32_t*>(data)[offset]
                                : static_cast<const int64_t*>(data)[offset];
  }
};

// How a product's weights are kept; `bits` 0: of a float type.
struct Packing {
  int group_size, bits;
  bool has_bias;
  bool operator==(const Packing&) const = default;
};

// Throws std::invalid_argument for what is no float.
Type type_of(mx::Dtype dtype);

// Appends `weight` [..., outputs, inputs], `scales`, `biases` and `bias` [..., outputs], as far as they are given, to a
// primitive's inputs. Throws std::invalid_argument where they do not fit each other or rows of `num_inputs`.
void append_weight(std::vector<mx::array>& to, int num_inputs, const mx::array& weight,
                   const std::optional<mx::array>& scales, const std::optional<mx::array>& biases,
                   const std::optional<mx::array>& bias, int group_size, int bits, mx::Stream stream);

// The product with the weight that begins at inputs[at]; its rows, x and y, are left open.
Linear product_of(const std::vector<mx::array>& inputs, size_t at, const Packing& how);

// How many columns of the product one thread takes at a time; `num_weights` products like it share the threads.
int64_t columns_per_task(const Linear& call, int64_t num_weights = 1);

// A stage that lays `count` rows out as the kernels read them, the i-th of them row from(i).
template <class From>
Stage lay_out(int depth, const Rows& rows, int64_t count, const Linear& call, float* to, From from) {
  int64_t stride = call.row_stride, per_task = std::max<int64_t>(1, 64 * 1024 / stride);
  return {depth, (count + per_task - 1) / per_task, count * stride, [=, packed = call.bits == 4](int64_t task) {
    int64_t last = std::min(count, (task + 1) * per_task);
    for (int64_t i = task * per_task; i < last; i++)
      if (int64_t row = from(i); row >= 0) rows.lay_out(row, stride, packed, to + i * stride);
  }};
}

}  // namespace mlxcel
