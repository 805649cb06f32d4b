#define MLXCEL_LEVEL neon
#define MLXCEL_NEON
#include "attend_kernel.h"
#include "linear_kernel.h"
#include "norm_kernel.h"

namespace mlxcel {
extern const Level level_neon;
const Level level_neon{"NEON", neon::linear, neon::attend, neon::rms_norm};
}  // namespace mlxcel
