// A decode step of so many tokens, recorded once and run again as one call.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mlx/array.h"

namespace mlxcel {

// What a step writes to and reads from. Dense: keys and values by layer and row, [1, heads, capacity, dim], and the
// position that each of these pairs begins with. Paged, where there are tables: keys and values by layer,
// [1, heads, blocks of kPage, dim]; of each layer its group; and by group and row the table of blocks and the position that
// it begins with, a multiple of kPage. `counts` says how many tokens each row brings; empty: one.
struct Storage {
  struct Table {
    const int32_t* blocks;
    int64_t count;
  };

  std::vector<mlx::core::array> arrays;
  std::vector<int64_t> bases;
  std::vector<Table> tables = {};
  std::vector<int64_t> groups = {};
  std::vector<int64_t> counts = {};
};

class Program {
 public:
  // Records how `result` follows from `ids` and `positions`, int32 [tokens, 1] and [tokens] that nobody has computed.
  // Throws std::invalid_argument where that cannot be recorded.
  Program(const mlx::core::array& ids, const mlx::core::array& positions, const mlx::core::array& result,
          int num_layers);
  ~Program();

  // One step, of tokens that follow each other in each row, written into storage in place. Runs on the calling thread
  // and the pool's.
  mlx::core::array run(const std::vector<int32_t>& ids, const std::vector<int32_t>& positions,
                       const Storage& storage);

  // One step on the calling thread alone: how often each operation ran, and for how many seconds in all.
  std::map<std::string, std::pair<int, double>> profile(const std::vector<int32_t>& ids,
                                                        const std::vector<int32_t>& positions, const Storage& storage);

  int num_phases() const;
  std::vector<std::string> foreign() const;  // operations that are MLX's own

 private:
  class Recorded;
  std::unique_ptr<Recorded> recorded_;
};

// In a recording: the attention of a layer over rows that `run` will be given. `keys` and `values` of their new tokens are
// appended first, or show how those look that the layer already has.
mlx::core::array attend_in_program(const mlx::core::array& queries, const mlx::core::array& keys,
                                   const mlx::core::array& values, bool appends, int layer, float scale,
                                   int64_t window, const std::optional<mlx::core::array>& sinks);

}  // namespace mlxcel
