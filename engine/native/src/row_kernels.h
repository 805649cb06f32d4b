// What is done to rows or single values, for one level: norms, each row summed up in one order, and activations.
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

inline void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t rows,
                       int64_t length, float* y) {
  int64_t whole = length / kLanes * kLanes;
  for (int64_t row = 0; row < rows; row++, x += length, y += length) {
    V sum[4] = {zero(), zero(), zero(), zero()}, squares[4] = {zero(), zero(), zero(), zero()};
    int turn = 0;
    for (int64_t i = 0; i < whole; i += kLanes, turn = (turn + 1) & 3) sum[turn] = add(sum[turn], load(x + i));
    float total = sum_of(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
    for (int64_t i = whole; i < length; i++) total += x[i];
    float mean = total / float(length);
    turn = 0;
    for (int64_t i = 0; i < whole; i += kLanes, turn = (turn + 1) & 3) {
      V v = add(load(x + i), all(-mean));
      squares[turn] = fma(v, v, squares[turn]);
    }
    float apart = sum_of(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
    for (int64_t i = whole; i < length; i++) apart += (x[i] - mean) * (x[i] - mean);
    float factor = 1.0f / __builtin_sqrtf(apart / float(length) + eps);
    for (int64_t i = 0; i < whole; i += kLanes) {
      V v = mul(add(load(x + i), all(-mean)), all(factor));
      if (weight) v = mul(v, load(weight + i));
      store(y + i, bias ? add(v, load(bias + i)) : v);
    }
    for (int64_t i = whole; i < length; i++)
      y[i] = (x[i] - mean) * factor * (weight ? weight[i] : 1.0f) + (bias ? bias[i] : 0.0f);
  }
}

// Writes work(a, b) for each vector of the two arrays; without a second one, b is a.
template <class Work>
inline void each(const float* first, const float* second, int64_t length, float* y, const Work& work) {
  for (int64_t i = 0; i < length; i += kLanes) {
    int64_t left = length - i;
    bool whole = left >= kLanes;
    V a = whole ? load(first + i) : load_part(first + i, int(left)), b = a;
    if (second) b = whole ? load(second + i) : load_part(second + i, int(left));
    V out = work(a, b);
    if (whole) {
      store(y + i, out);
    } else {
      float part[kLanes];
      store(part, out);
      std::memcpy(y + i, part, left * sizeof(float));
    }
  }
}

inline V over_one_plus_exp(V v, V x) { return div(v, add(all(1), exp(x))); }

inline void swiglu(const float* gate, const float* x, int64_t length, float* y) {
  each(gate, x, length, y, [](V g, V v) { return mul(over_one_plus_exp(g, mul(g, all(-1))), v); });
}

// exp(a * a / 2) times half of erfc(a / sqrt(2)), over t = 1 / (1 + 0.3 a), as a polynomial of t: the form is that of
// Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 7.1.26; the coefficients were fitted for the least
// relative error, 2e-7 from 0 to 13.5.
constexpr float kTail[] = {-0.1582764374f, 0.2082072873f, -0.0553944115f, 0.1294694684f,
                           0.0996374205f,  0.1207983688f, 0.1196263891f};

// Both tails of the normal distribution are taken from the one that is small, so that nothing cancels.
inline V gelu(V v) {
  V a = min(all(16), max(v, mul(v, all(-1))));  // in this order what is not a number stays so
  V t = div(all(1), fma(all(0.3f), a, all(1)));
  V sum = all(0.0359318505f);
  for (float c : kTail) sum = fma(sum, t, all(c));
  V tail = mul(mul(sum, t), exp(mul(mul(a, all(-0.5f)), a)));
  return add(max(all(0), v), mul(mul(a, all(-1)), tail));
}

inline V gelu_tanh(V v) {
  // v * (1 + tanh(u)) / 2 is v / (1 + exp(-2 u))
  V twice = mul(v, fma(mul(v, v), all(0.044715f * 1.5957691216f), all(1.5957691216f)));
  return over_one_plus_exp(v, mul(twice, all(-1)));
}

template <class Function>
inline void activate_by(const Function& function, const float* gate, const float* x, int64_t length, float* y) {
  if (x)
    each(gate, x, length, y, [&](V g, V v) { return mul(function(g), v); });
  else
    each(gate, nullptr, length, y, [&](V g, V) { return function(g); });
}

inline void activate(const Activate& how, const float* gate, const float* x, int64_t length, float* y) {
  switch (how.kind) {
    case Activation::gelu: return activate_by(gelu, gate, x, length, y);
    case Activation::gelu_tanh: return activate_by(gelu_tanh, gate, x, length, y);
    case Activation::gelu_sigmoid:
      return activate_by([](V v) { return over_one_plus_exp(v, mul(v, all(-1.702f))); }, gate, x, length, y);
    case Activation::clipped_swiglu:
      return each(gate, x, length, y, [&](V g, V v) {
        g = min(all(how.limit), g);
        v = min(all(how.limit), max(all(-how.limit), v));
        return mul(add(v, all(1)), over_one_plus_exp(g, mul(g, all(-how.slope))));
      });
  }
}

// The largest of each stretch is found by vectors; then only the first stretch that has it is looked through.
inline int64_t argmax(const float* x, int64_t length) {
  constexpr int64_t kStretch = 32 * kLanes;
  int64_t whole = length / kStretch * kStretch, found = whole;
  float largest = 0;
  bool any = false;
  for (int64_t start = 0; start < whole; start += kStretch) {
    V tops[4] = {load(x + start), load(x + start + kLanes), load(x + start + 2 * kLanes), load(x + start + 3 * kLanes)};
    for (int64_t i = 4 * kLanes; i < kStretch; i += 4 * kLanes)
      for (int k = 0; k < 4; k++) tops[k] = max(tops[k], load(x + start + i + k * kLanes));
    float top = max_of(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
    if (any && !(top > largest)) continue;
    any = true;
    largest = top;
    found = start;
  }
  int64_t best = whole < length ? whole : 0;
  for (int64_t i = whole + 1; i < length; i++)
    if (x[i] > x[best]) best = i;
  if (!any || (whole < length && x[best] > largest)) return best;
  for (int64_t i = found; i < found + kStretch; i++)
    if (x[i] == largest) return i;
  return found;  // not a number
}

}  // namespace mlxcel::MLXCEL_LEVEL
