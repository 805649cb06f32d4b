#define MLXCEL_LEVEL avx2
#define MLXCEL_AVX2
#include "attend_kernel.h"
#include "linear_kernel.h"
#include "row_kernels.h"

namespace mlxcel {
extern const Level level_avx2;
const Level level_avx2{"AVX2", avx2::kMoreRows, avx2::linear, avx2::append, avx2::attend, avx2::merge, avx2::rms_norm,
                        avx2::swiglu, avx2::layer_norm, avx2::activate, avx2::argmax};
}  // namespace mlxcel
