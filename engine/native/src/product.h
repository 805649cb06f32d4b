// What products with weights share: weights checked and as the kernels read them, rows laid out, columns cut into tasks.
#pragma once

#include <optional>

#include "levels.h"
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

// Whether the kernel takes the rows together, block by block.
inline bool takes_few_rows(const Linear& call) {
  return call.num_rows <= level().few_rows && call.num_inputs % kBlock == 0;
}

// How many columns of the product one thread takes at a time; `num_weights` products like it share the threads.
int64_t columns_per_task(const Linear& call, int64_t num_weights = 1);

// Lays row `i` of a call's `num_rows` out as the kernels read it, to `to`, where the first of them lies.
inline void lay_out(const Rows& rows, int64_t row, const Linear& call, int64_t i, float* to) {
  if (takes_few_rows(call)) return rows.lay_out(row, call.bits == 4, kBlock * call.num_rows, to + i * kBlock);
  rows.lay_out(row, call.bits == 4, kBlock, to + i * call.row_stride);
}

}  // namespace mlxcel
