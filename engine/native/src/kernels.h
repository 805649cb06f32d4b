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

constexpr int64_t kLongestVector = 16;

struct Linear {
  const float* x;  // [num_rows, row_stride], a block's even elements first where bits is 4; of few rows and whole
                   // blocks [blocks, num_rows, kBlock]
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

// Heads of the call's tokens: element (token, head, i) at token * strides[0] + head * strides[1] + i.
struct Heads {
  const float* data;
  int64_t strides[2];

  const float* at(int64_t token, int64_t head) const { return data + token * strides[0] + head * strides[1]; }
};

// Positions that share one block of a pool.
constexpr int64_t kPage = 16;

// A piece of a row's tokens that attend: `count` queries, the first of them at `position`, and where its keys lie.
struct Span {
  int64_t start, count, position;  // of its first token in the call and in its row
  int64_t base;                    // position of the first key in storage; paged: a multiple of kPage
  void* keys;                      // [key heads, capacity, key_dim]
  void* values;                    // likewise, of value_dim
  int64_t capacity;
  const int32_t* table;  // which kPage places of a pool hold those positions from `base` on; null: not paged
};

struct Attention {
  Heads queries;       // [tokens, num_heads, key_dim]
  Heads keys, values;  // [tokens, num_key_heads, dim], which are stored first; null: all is stored
  float* out;          // [tokens, num_heads, value_dim]
  const float* sinks;  // [num_heads], or null
  int64_t num_heads, num_key_heads, key_dim, value_dim;
  Type type;       // of what is stored
  int64_t window;  // how many positions, its own included, a query sees; 0: all
  float scale;
  float softcap;  // scores become softcap * tanh(score / softcap); 0: stay

  // The first position that the query at `position` sees.
  int64_t first_key(int64_t position) const { return window && position >= window ? position + 1 - window : 0; }
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

// Positions whose keys are attended to from nothing; where a query sees several parts, their results are merged.
constexpr int64_t kPartKeys = 512;

// The queries [first, last) of a span, in all heads that share a key head, over the parts [first_part, last_part].
struct AttendTask {
  const Span* span;
  int64_t key_head, first, last;
  int64_t first_part, last_part;
  float* partial;  // partial_floats for each query and head, which a merge reads; null: there is nothing to merge
};

inline int64_t padded(int64_t dim) { return (dim + kLongestVector - 1) / kLongestVector * kLongestVector; }
inline int64_t partial_floats(const Attention& call) { return 2 + padded(call.value_dim); }

struct Level {
  const char* name;
  int few_rows;  // up to so many rows are taken together
  // Columns [first, last) of the product. `scratch` holds scratch_floats(call).
  void (*linear)(const Linear& call, int64_t first, int64_t last, float* scratch);
  // Stores one head of the keys and values of the span's tokens [first, last).
  void (*append)(const Attention& call, const Span& span, int64_t key_head, int64_t first, int64_t last);
  // `scratch` holds scratch_floats(call, task).
  void (*attend)(const Attention& call, const AttendTask& task, float* scratch);
  // Merges what the tasks of each part have left, part after part from `task.partial` on.
  void (*merge)(const Attention& call, const AttendTask& task, float* scratch);
  // Rows of `length`, each times 1 / sqrt(mean of squares + eps), then times `weight` where there is one.
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t rows, int64_t length, float* y);
  // gate * sigmoid(gate) * x
  void (*swiglu)(const float* gate, const float* x, int64_t length, float* y);
  // Rows of `length` less their mean, over their standard deviation, times `weight` and plus `bias` where they are.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t rows, int64_t length,
                     float* y);
  // `how` of each value of `gate`, times x where there is one.
  void (*activate)(const Activate& how, const float* gate, const float* x, int64_t length, float* y);
  // Where the largest of `length` values is, the first of equal ones.
  int64_t (*argmax)(const float* x, int64_t length);
};

constexpr int64_t kPanelColumns = 32;

inline int64_t scratch_floats(const Linear& call) {
  int64_t scales = call.bits ? 2 * 4 * (call.num_inputs / call.group_size + 16) : 0;
  return kPanelColumns * call.num_blocks() * kBlock + scales;
}

inline int64_t scratch_floats(const Attention& call, const AttendTask& task) {
  int64_t rows = (task.last - task.first) * (call.num_heads / call.num_key_heads), keys = 32;
  int64_t key_dim = padded(call.key_dim), value_dim = padded(call.value_dim);
  return rows * (key_dim + 2 * value_dim + 4) + keys * (key_dim + value_dim) + kLongestVector;
}

}  // namespace mlxcel
