// Append and attention over rows' dense storage, as one primitive of MLX's graph.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "kernels.h"
#include "mlx/array.h"

namespace mlxcel {

// What one call of attention does, in pieces for whatever threads there are. Knows nothing of MLX.
//
// First all of `append`, then all of `run`, then all of `merge`; within each in any order and on any threads. What
// `call` and `spans` point to must stay until then. One thread prepares; used again, it keeps what it allocated.
class AttendWork {
 public:
  void prepare(const Attention& call, const std::vector<Span>& spans);

  int64_t num_appends() const { return int64_t(appends_.size()); }
  void append(int64_t i);
  int64_t num_tasks() const { return int64_t(tasks_.size()); }
  void run(int64_t i);
  int64_t num_merges() const { return int64_t(merges_.size()); }
  void merge(int64_t i);

  // Whether it is so much that other threads are worth the hand-over.
  bool is_large() const;

 private:
  struct Task {
    AttendTask task;
    int64_t partial = -1;  // where in partials_
    bool appends = false;  // what of the span lies in its parts
  };

  void add(const Span& span);
  void add_parts(const Span& span, int64_t key_head, int64_t first_part, int64_t last_part);
  AttendTask with_partial(const Task& task);

  Attention call_{};
  std::vector<Span> spans_;
  std::vector<Task> appends_, tasks_, merges_;
  std::vector<float> partials_;
  int64_t num_partials_ = 0, products_ = 0;
};

// Of each span: where its tokens start in the call, how many they are, the position of the first of them in its row,
// and the position that its storage begins with.
using SpanPlace = std::array<int64_t, 4>;

// `queries` are [tokens, heads, 1, dim]; `storage` holds each span's keys and values, [1, key heads, capacity, dim],
// one after the other, all of float32, float16 or bfloat16. Where `keys` and `values` [tokens, key heads, 1, dim] are
// given they are first rounded and written into storage, in place. The window is in positions, the query's own
// included; 0: none. Scores are capped where `softcap` is not 0.
//
// Returns the attention's output [tokens, heads, 1, value dim]; behind it, where keys were given, the storage again.
// Whoever goes on with a row must use these arrays: they say that the write has been done.
std::vector<mlx::core::array> attend(const mlx::core::array& queries, const std::optional<mlx::core::array>& keys,
                                     const std::optional<mlx::core::array>& values,
                                     const std::vector<mlx::core::array>& storage,
                                     const std::vector<SpanPlace>& places, float scale, int64_t window,
                                     const std::optional<mlx::core::array>& sinks, float softcap);

// The same over a pool, [1, key heads, blocks of kPage, dim] for keys and for values, and of each span a table, int32,
// of the blocks that hold its positions from where its storage begins, a multiple of kPage. A table that names a block
// outside of the pool is an error when the work is done; what it names twice is written twice.
std::vector<mlx::core::array> attend_paged(const mlx::core::array& queries,
                                           const std::optional<mlx::core::array>& keys,
                                           const std::optional<mlx::core::array>& values,
                                           const mlx::core::array& key_pool, const mlx::core::array& value_pool,
                                           const std::vector<mlx::core::array>& tables,
                                           const std::vector<SpanPlace>& places, float scale, int64_t window,
                                           const std::optional<mlx::core::array>& sinks, float softcap);

}  // namespace mlxcel
