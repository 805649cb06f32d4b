// A decode step, recorded once and run again as one call.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mlx/array.h"

namespace mlxcel {

// A layer's keys and values of one row, and the position of the first of them.
struct Stored {
  float* keys;    // [heads, capacity, key_dim]
  float* values;  // [heads, capacity, value_dim]
  int64_t capacity, base;
};

// A layer's storage as its attentions were recorded, and where it lies for each row. `reach`: how many positions, its
// own included, a token of it may see; 0: nothing attends to it.
struct LiveLayer {
  int64_t heads = 0, key_dim = 0, value_dim = 0, reach = 0;
  std::vector<Stored> rows;
};

// What changes from step to step: each row's position, and where each attention finds its keys and values.
struct LiveRows {
  std::vector<int32_t> positions;
  std::vector<LiveLayer> layers;
};

class Program {
 public:
  // Records how `result` follows from `ids` and `positions`, int32 [rows, 1] and [rows] that nobody has computed.
  // Throws std::invalid_argument where that cannot be recorded.
  Program(const mlx::core::array& ids, const mlx::core::array& positions, const mlx::core::array& result,
          int num_layers);
  ~Program();

  // One step. `storage` are keys and values by layer and row, [1, heads, capacity, dim], written in place; `bases`
  // the position that each of these pairs begins with. Runs on the calling thread and the pool's.
  mlx::core::array run(const std::vector<int32_t>& ids, const std::vector<int32_t>& positions,
                       const std::vector<mlx::core::array>& storage, const std::vector<int64_t>& bases);

  int num_phases() const;
  std::vector<std::string> foreign() const;  // operations that are MLX's own

 private:
  class Recorded;
  std::unique_ptr<Recorded> recorded_;
};

// In a recording: the attention of a layer over rows that `run` will be given, one new token each. `keys` and `values`
// are appended first, or show how those look that the layer already has.
mlx::core::array attend_in_program(const mlx::core::array& queries, const mlx::core::array& keys,
                                   const mlx::core::array& values, bool appends, int layer, float scale,
                                   int64_t window, const std::optional<mlx::core::array>& sinks);

}  // namespace mlxcel
