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

  // One row as it is.
  void copy(int64_t row, float* to) const {
    const float* from = at(row);
    int64_t step = dense ? 1 : strides.back();
    if (step == 1) {
      std::memcpy(to, from, length * sizeof(float));
    } else {
      for (int64_t i = 0; i < length; i++) to[i] = from[i * step];
    }
  }

  // One row in the blocks that products read, zero-padded to whole ones, each `apart` from the one before.
  void lay_out(int64_t row, bool even_first, int64_t apart, float* to) const {
    const float* from = at(row);
    int64_t step = dense ? 1 : strides.back();
    for (int64_t start = 0; start < length; start += kBlock, to += apart) {
      int64_t count = length - start < kBlock ? length - start : kBlock;
      const float* block = from + start * step;
      if (even_first && count == kBlock) {
        for (int64_t i = 0; i < kBlock / 2; i++) {
          to[i] = block[2 * i * step];
          to[kBlock / 2 + i] = block[(2 * i + 1) * step];
        }
        continue;
      }
      if (step == 1) {
        std::memcpy(to, block, count * sizeof(float));
      } else {
        for (int64_t i = 0; i < count; i++) to[i] = block[i * step];
      }
      for (int64_t i = count; i < kBlock; i++) to[i] = 0;
    }
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

// A vector that straddles two lines of the cache takes twice as long to load; MLX's memory begins anywhere.
constexpr size_t kAlignment = 64;

template <class T>
T* aligned(T* at) {
  return reinterpret_cast<T*>((uintptr_t(at) + kAlignment - 1) / kAlignment * kAlignment);
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
