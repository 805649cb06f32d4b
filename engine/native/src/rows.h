// Norms, the rotary embedding and activations as primitives of MLX's graph; all in float32.
#pragma once

#include <optional>
#include <string>

#include "mlx/array.h"

namespace mlxcel {

mlx::core::array rms_norm(const mlx::core::array& x, const std::optional<mlx::core::array>& weight, float eps);

mlx::core::array layer_norm(const mlx::core::array& x, const std::optional<mlx::core::array>& weight,
                            const std::optional<mlx::core::array>& bias, float eps);

// As mx.fast.rope: `x` is [batch, ..., length, dim], `offset` int32, one or one for each of the batch.
mlx::core::array rope(const mlx::core::array& x, int dims, bool traditional, std::optional<float> base, float scale,
                      const mlx::core::array& offset, const std::optional<mlx::core::array>& freqs);

mlx::core::array swiglu(const mlx::core::array& gate, const mlx::core::array& x);

// GELU of `gate`, exact or approximated by "tanh" or "sigmoid", times `x` where it is given.
mlx::core::array gelu(const mlx::core::array& gate, const std::string& approximation,
                      const std::optional<mlx::core::array>& x);

// With the gate cut off above `limit` and x on both sides: gate * sigmoid(slope * gate) * (x + 1).
mlx::core::array clipped_swiglu(const mlx::core::array& gate, const mlx::core::array& x, float slope, float limit);

// Where the largest value of each row is, the first of equal ones: int32 [rows]; at once where the rows are evaluated.
mlx::core::array argmax(const mlx::core::array& x);

}  // namespace mlxcel
