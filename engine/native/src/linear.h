// x·Wᵀ (+ bias), and a weight's rows, as primitives of MLX's graph.
#pragma once

#include <optional>

#include "mlx/array.h"
#include "mlx/utils.h"

namespace mlxcel {

// `x` is float32 [..., inputs]. `weight` is [outputs, inputs] of a float type, or packed to `bits` bits with `scales`
// and `biases` [outputs, inputs / group_size]. Throws std::invalid_argument for anything else.
mlx::core::array linear(const mlx::core::array& x, const mlx::core::array& weight,
                        const std::optional<mlx::core::array>& scales, const std::optional<mlx::core::array>& biases,
                        const std::optional<mlx::core::array>& bias, int group_size, int bits);

// Rows of such a weight by `ids`, which are checked before: float32 [..., inputs].
mlx::core::array embed(const mlx::core::array& ids, const mlx::core::array& weight,
                       const std::optional<mlx::core::array>& scales, const std::optional<mlx::core::array>& biases,
                       int group_size, int bits);

}  // namespace mlxcel
