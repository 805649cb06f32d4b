// Each row times the expert that was chosen for it, as a primitive of MLX's graph.
#pragma once

#include <optional>

#include "mlx/array.h"
#include "mlx/utils.h"

namespace mlxcel {

// `x` is float32 [..., rows, inputs], its leading axes broadcast against the whole numbers `indices` [...], each the
// expert whose weight all rows under it are multiplied with. `weight` is [experts, outputs, inputs] of a float type, or
// packed to `bits` bits with `scales` and `biases` [experts, outputs, inputs / group_size]; `bias` is
// [experts, outputs]. A row's output has the bits of `linear` with that expert's weight; where there is no such expert it
// is not a number. Throws std::invalid_argument for anything else.
mlx::core::array gather_linear(const mlx::core::array& x, const mlx::core::array& weight,
                               const mlx::core::array& indices, const std::optional<mlx::core::array>& scales,
                               const std::optional<mlx::core::array>& biases,
                               const std::optional<mlx::core::array>& bias, int group_size, int bits);

}  // namespace mlxcel
