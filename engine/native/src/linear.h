// x·Wᵀ (+ bias) as a primitive of MLX's graph.
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

}  // namespace mlxcel
