#define MLXCEL_LEVEL neon
#define MLXCEL_NEON
#include "attend_kernel.h"
#include "linear_kernel.h"
#include "row_kernels.h"

namespace mlxcel {
extern const Level level_neon;
const Level level_neon{"NEON", neon::kMoreRows, neon::linear, neon::append, neon::attend, neon::merge, neon::rms_norm,
                        neon::swiglu, neon::layer_norm, neon::activate, neon::argmax};
}  // namespace mlxcel
