// RMSNorm, the rotary embedding and SwiGLU as primitives of MLX's graph; all in float32.
#pragma once

#include <optional>

#include "mlx/array.h"

namespace mlxcel {

mlx::core::array rms_norm(const mlx::core::array& x, const std::optional<mlx::core::array>& weight, float eps);

// As mx.fast.rope: `x` is [batch, ..., length, dim], `offset` int32, one or one for each of the batch.
mlx::core::array rope(const mlx::core::array& x, int dims, bool traditional, std::optional<float> base, float scale,
                      const mlx::core::array& offset, const std::optional<mlx::core::array>& freqs);

mlx::core::array swiglu(const mlx::core::array& gate, const mlx::core::array& x);

}  // namespace mlxcel
