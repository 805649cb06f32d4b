// Causal attention of one level, with an online softmax over blocks of keys.
// Source of the softmax: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
//
// Blocks begin at multiples of their size in the row's positions, and a query meets those that hold a key it sees in
// the order of their positions. What else is in the call, how the prompt was cut and where storage begins leave no
// trace in its bits.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace mlxcel::MLXCEL_LEVEL {

constexpr int64_t kKeys = 32;
constexpr int kKeyVectors = kKeys / kLanes;
constexpr float kNever = -3.0e38f;

// Vectors of one row of `dim` values, the last of them partly filled.
template <int64_t fixed>
struct Row {
  static constexpr int64_t kMost = (fixed ? fixed : kMaxHeadDim) / kLanes;
  int64_t dim;

  int64_t vectors() const { return fixed ? fixed / kLanes : (dim + kLanes - 1) / kLanes; }
  V at(const float* from, int64_t vector) const {
    if constexpr (fixed != 0) return load(from + vector * kLanes);
    int64_t left = dim - vector * kLanes;
    return left >= kLanes ? load(from + vector * kLanes) : load_part(from + vector * kLanes, int(left));
  }
  void put(float* to, int64_t vector, V v) const {
    int64_t left = fixed ? kLanes : dim - vector * kLanes;
    if (left >= kLanes) return store(to + vector * kLanes, v);
    float part[kLanes];
    store(part, v);
    std::memcpy(to + vector * kLanes, part, left * sizeof(float));
  }
};

// One query of one head over the keys of positions [first, last].
template <int64_t fixed>
void attend_one(const Attention& call, const Span& span, int64_t head, const float* query, int64_t first,
                int64_t last, float* out) {
  using Line = Row<fixed>;
  Line key_row{call.key_dim}, value_row{call.value_dim};
  int64_t key_head = head / (call.num_heads / call.num_key_heads);
  const float* keys = (const float*)span.keys + (key_head * span.capacity - span.base) * call.key_dim;
  const float* values = (const float*)span.values + (key_head * span.capacity - span.base) * call.value_dim;

  V q[Line::kMost], sum[Line::kMost];
  for (int64_t i = 0; i < key_row.vectors(); i++) q[i] = mul(key_row.at(query, i), all(call.scale));
  for (int64_t i = 0; i < value_row.vectors(); i++) sum[i] = zero();
  float largest = call.sinks ? call.sinks[head] : kNever;
  float total = call.sinks ? 1 : 0;

  for (int64_t block = first / kKeys * kKeys; block <= last; block += kKeys) {
    int64_t from = block > first ? block : first, until = block + kKeys <= last ? block + kKeys : last + 1;
    alignas(64) float scores[kKeys];
    for (int64_t i = 0; i < kKeys; i++) scores[i] = kNever;
    for (int64_t key = from; key < until; key += 4) {
      int count = until - key < 4 ? int(until - key) : 4;
      V dots[4] = {zero(), zero(), zero(), zero()};
      const float* lines[4];
      for (int k = 0; k < 4; k++) lines[k] = keys + (key + (k < count ? k : 0)) * call.key_dim;
      for (int64_t i = 0; i < key_row.vectors(); i++)
        for (int k = 0; k < 4; k++) dots[k] = fma(q[i], key_row.at(lines[k], i), dots[k]);
      float four[4];
      sums(dots, four);
      for (int k = 0; k < count; k++) scores[key - block + k] = four[k];
    }

    float highest = largest;
    for (int64_t i = 0; i < kKeys; i++) highest = scores[i] > highest ? scores[i] : highest;
    if (highest > largest) {
      V shrink = exp(all(largest - highest));
      for (int64_t i = 0; i < value_row.vectors(); i++) sum[i] = mul(sum[i], shrink);
      float factor[kLanes];
      store(factor, shrink);
      total *= factor[0];
      largest = highest;
    }
    V part = zero();
    for (int v = 0; v < kKeyVectors; v++) {
      V weight = exp(add(load(scores + v * kLanes), all(-largest)));
      store(scores + v * kLanes, weight);
      part = add(part, weight);
    }
    total += sum_of(part);
    for (int64_t key = from; key < until; key++) {
      V weight = all(scores[key - block]);
      const float* line = values + key * call.value_dim;
      for (int64_t i = 0; i < value_row.vectors(); i++) sum[i] = fma(weight, value_row.at(line, i), sum[i]);
    }
  }
  V norm = all(1.0f / total);
  for (int64_t i = 0; i < value_row.vectors(); i++) value_row.put(out, i, mul(sum[i], norm));
}

inline void attend(const Attention& call, const Span& span, int64_t head, int64_t first, int64_t last) {
  auto one = call.key_dim == 64 && call.value_dim == 64     ? attend_one<64>
             : call.key_dim == 128 && call.value_dim == 128 ? attend_one<128>
                                                            : attend_one<0>;
  for (int64_t i = first; i < last; i++) {
    int64_t token = span.start + i, position = span.position + i;
    int64_t first_key = call.window && position + 1 > call.window ? position + 1 - call.window : 0;
    const float* query = call.queries.at(token, head);
    float* out = call.out + (token * call.num_heads + head) * call.value_dim;
    one(call, span, head, query, first_key, position, out);
  }
}

}  // namespace mlxcel::MLXCEL_LEVEL
