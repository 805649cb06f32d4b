// Where weights lie.
#pragma once

#include <vector>

#include "mlx/array.h"

namespace mlxcel {

// Copies of evaluated, dense arrays, one behind the other in one buffer that asks for huge pages. Reading weights is
// what a decode step does, and with small pages the processor spends as long on finding them as on reading them.
std::vector<mlx::core::array> lay_together(const std::vector<mlx::core::array>& arrays);

}  // namespace mlxcel
