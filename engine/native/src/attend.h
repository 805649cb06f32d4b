// Append and attention over rows' dense storage, as one primitive of MLX's graph.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "mlx/array.h"

namespace mlxcel {

// Of each span: where its tokens start in the call, how many they are, the position of the first of them in its row,
// and the position that its storage begins with.
using SpanPlace = std::array<int64_t, 4>;

// `queries` are [tokens, heads, 1, dim]; `storage` holds each span's keys and values, [1, key heads, capacity, dim],
// one after the other. Where `keys` and `values` [tokens, key heads, 1, dim] are given they are first written into
// storage, in place.
//
// Returns the attention's output [tokens, heads, 1, value dim]; behind it, where keys were given, the storage again.
// Whoever goes on with a row must use these arrays: they say that the write has been done.
std::vector<mlx::core::array> attend(const mlx::core::array& queries, const std::optional<mlx::core::array>& keys,
                                     const std::optional<mlx::core::array>& values,
                                     const std::vector<mlx::core::array>& storage,
                                     const std::vector<SpanPlace>& places, float scale, int64_t window,
                                     const std::optional<mlx::core::array>& sinks);

}  // namespace mlxcel
