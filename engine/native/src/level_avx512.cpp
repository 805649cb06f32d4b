#define MLXCEL_LEVEL avx512
#define MLXCEL_AVX512
#include "attend_kernel.h"
#include "linear_kernel.h"
#include "row_kernels.h"

namespace mlxcel {
extern const Level level_avx512;
const Level level_avx512{"AVX-512", avx512::kMoreRows, avx512::linear, avx512::append, avx512::attend, avx512::merge, avx512::rms_norm,
                        avx512::swiglu, avx512::layer_norm, avx512::activate, avx512::argmax};
}  // namespace mlxcel
