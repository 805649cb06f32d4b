#define MLXCEL_LEVEL plain
#include "attend_kernel.h"
#include "linear_kernel.h"
#include "row_kernels.h"

namespace mlxcel {
extern const Level level_plain;
const Level level_plain{"plain C++", plain::kMoreRows, plain::linear, plain::append, plain::attend, plain::merge, plain::rms_norm,
                        plain::swiglu, plain::layer_norm, plain::activate, plain::argmax};
}  // namespace mlxcel
