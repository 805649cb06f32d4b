// What is done to rows or single values, for one level: RMSNorm, each row summed up in one order, and SwiGLU.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace mlxcel::MLXCEL_LEVEL {

inline void rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t length, float* y) {
  int64_t whole = length / kLanes * kLanes;
  for (int64_t row = 0; row < rows; row++, x += length, y += length) {
    V squares[4] = {zero(), zero(), zero(), zero()};
    int turn = 0;
    for (int64_t i = 0; i < whole; i += kLanes, turn = (turn + 1) & 3) {
      V v = load(x + i);
      squares[turn] = fma(v, v, squares[turn]);
    }
    float total = sum_of(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
    for (int64_t i = whole; i < length; i++) total += x[i] * x[i];
    float factor = 1.0f / __builtin_sqrtf(total / float(length) + eps);
    for (int64_t i = 0; i < whole; i += kLanes) {
      V v = mul(load(x + i), all(factor));
      store(y + i, weight ? mul(v, load(weight + i)) : v);
    }
    for (int64_t i = whole; i < length; i++) y[i] = x[i] * factor * (weight ? weight[i] : 1.0f);
  }
}

inline void swiglu(const float* gate, const float* x, int64_t length, float* y) {
  for (int64_t i = 0; i < length; i += kLanes) {
    int64_t left = length - i;
    bool whole = left >= kLanes;
    V g = whole ? load(gate + i) : load_part(gate + i, int(left));
    V v = whole ? load(x + i) : load_part(x + i, int(left));
    V out = mul(div(g, add(all(1), exp(mul(g, all(-1))))), v);
    if (whole) {
      store(y + i, out);
    } else {
      float part[kLanes];
      store(part, out);
      std::memcpy(y + i, part, left * sizeof(float));
    }
  }
}

}  // namespace mlxcel::MLXCEL_LEVEL
