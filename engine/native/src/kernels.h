// What every level of the CPU offers, in plain pointers. Knows neither MLX nor threads.
//
// The promise of all of it: an output's bits depend on its own inputs, never on how many rows or columns share the
// call. So an output is always summed up in the same order, whatever tile it falls into.
#pragma once

#include <cstdint>

namespace mlxcel {

enum class Type { float32, float16, bfloat16 };

// Rows of inputs are read in blocks of 32, zero-padded to whole ones.
constexpr int64_t kBlock = 32;

struct Linear {
  const float* x;  // [num_rows, row_stride], a block's even elements first where bits is 4
  float* y;        // [num_rows, num_columns], or as `places` says
  int64_t num_rows, row_stride;
  int64_t num_inputs, num_columns;

  const void* weight;  // [num_columns, num_inputs], or packed to `bits` bits each
  Type weight_type;    // where bits is 0
  int bits;            // 0: not quantized

  const void* scales;  // [num_columns, num_inputs / group_size]
  const void* biases;
  Type scale_type;
  int64_t group_size;

  const float* bias;  // [num_columns], or null

  const int64_t* places;  // [num_rows], the row of y that each row's output is, or null: its own

  int64_t num_blocks() const { return (num_inputs + kBlock - 1) / kBlock; }
};

// A piece of a row's tokens that attend: `count` queries, the first of them at `position`, and where its keys lie.
struct Span {
  int64_t start, count, position;  // of its first token in the call and in its row
  int64_t base;                    // position of the first key in storage
  float* keys;                     // [heads, capacity, key_dim]
  float* values;                   // [heads, capacity, value_dim]
  int64_t capacity;
};

struct Attention {
  const float* queries;  // element (token, head, i) at token * query_strides[0] + head * query_strides[1] + i
  int64_t query_strides[2];
  float* out;          // [tokens, num_heads, value_dim]
  const float* sinks;  // [num_heads], or null
  int64_t num_heads, num_key_heads, key_dim, value_dim;
  int64_t window;  // how many positions, its own included, a query sees; 0: all
  float scale;
};

constexpr int64_t kMaxHeadDim = 512;

// What is done to each value v, and to a second one w where there is one.
enum class Activation {
  gelu,              // v times the normal distribution's integral up to v
  gelu_tanh,         // its approximation by a hyperbolic tangent
  gelu_sigmoid,      // v * sigmoid(1.702 v)
  clipped_swiglu,    // c * sigmoid(slope c) * (w between -limit and limit, plus 1), c being v, limit at most
};

struct Activate {
  Activation kind;
  float slope, limit;  // of clipped_swiglu
  bool operator==(const Activate&) const = default;
};

struct Level {
  const char* name;
  // Columns [first, last) of the product. `scratch` holds scratch_floats(call).
  void (*linear)(const Linear& call, int64_t first, int64_t last, float* scratch);
  // One head of the span's queries [first, last).
  void (*attend)(const Attention& call, const Span& span, int64_t head, int64_t first, int64_t last);
  // Rows of `length`, each times 1 / sqrt(mean of squares + eps), then times `weight` where there is one.
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t rows, int64_t length, float* y);
  // gate * sigmoid(gate) * x
  void (*swiglu)(const float* gate, const float* x, int64_t length, float* y);
  // Rows of `length` less their mean, over their standard deviation, times `weight` and plus `bias` where they are.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t rows, int64_t length,
                     float* y);
  // `how` of each value of `gate`, times x where there is one.
  void (*activate)(const Activate& how, const float* gate, const float* x, int64_t length, float* y);
};

constexpr int64_t kPanelColumns = 32;

inline int64_t scratch_floats(const Linear& call) {
  int64_t scales = call.bits ? 2 * 4 * (call.num_inputs / call.group_size + 16) : 0;
  return kPanelColumns * call.num_blocks() * kBlock + scales;
}

}  // namespace mlxcel
