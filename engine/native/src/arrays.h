// What the primitives share: MLX's arrays as plain pointers.
#pragma once

#include <cstring>
#include <stdexcept>

#include "kernels.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/device.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace mlxcel {

namespace mx = mlx::core;

// Rows of `x`, each a last axis, wherever they lie.
struct Rows {
  const float* data;
  mx::Shape shape;
  mx::Strides strides;
  int64_t count, length;
  bool dense;

  explicit Rows(const mx::array& x)
      : data(x.data<float>()), shape(x.shape()), strides(x.strides()), dense(x.flags().row_contiguous) {
    length = shape.back();
    count = length ? int64_t(x.size()) / length : 0;
  }

  const float* at(int64_t row) const {
    if (dense) return data + row * length;
    int64_t offset = 0;
    for (int axis = int(shape.size()) - 2; axis >= 0; axis--) {
      offset += row % shape[axis] * strides[axis];
      row /= shape[axis];
    }
    return data + offset;
  }

  // One row in the order the kernels read it, zero-padded to `stride`.
  void lay_out(int64_t row, int64_t stride, bool even_first, float* to) const {
    const float* from = at(row);
    int64_t step = dense ? 1 : strides.back();
    if (even_first) {
      for (int64_t block = 0; block < length; block += kBlock)
        for (int64_t i = 0; i < kBlock / 2; i++) {
          to[block + i] = from[(block + 2 * i) * step];
          to[block + kBlock / 2 + i] = from[(block + 2 * i + 1) * step];
        }
    } else if (step == 1) {
      std::memcpy(to, from, length * sizeof(float));
    } else {
      for (int64_t i = 0; i < length; i++) to[i] = from[i * step];
    }
    for (int64_t i = length; i < stride; i++) to[i] = 0;
  }
};

// Loaded weights lie densely already; the extra operation is for those that do not or are not known to.
inline mx::array dense(const mx::array& a, mx::Stream stream) {
  if (a.is_available() && a.flags().row_contiguous) return a;
  return mx::contiguous(a, false, stream);
}

inline void expect(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

// `x` as float32.
inline mx::array wide(const mx::array& x, mx::Stream stream) {
  return x.dtype() == mx::float32 ? x : mx::astype(x, mx::float32, stream);
}

inline float* allocate(mx::array& out) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
  return out.data<float>();
}

// A primitive of the CPU alone.
class CpuPrimitive : public mx::Primitive {
 public:
  using Primitive::Primitive;

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("the compiled kernels run on the CPU alone");
  }

 protected:
  template <class Work>
  void dispatch(Work&& work) {
    mx::cpu::get_command_encoder(stream()).dispatch(std::forward<Work>(work));
  }
};

}  // namespace mlxcel
