// One call of a kernel as tasks for any number of threads, so that a step of MLX's graph and a recorded step of many
// kernels run the same code.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <tuple>
#include <vector>

#include "arena.h"
#include "arrays.h"
#include "pool.h"

namespace mlxcel {

// Tasks that any thread may take in any order. `depth` 0 needs the call's inputs alone, `depth` 1 what depth 0 made.
struct Stage {
  int depth;
  int64_t count;
  int64_t cost;  // about as many multiplications as all tasks together take
  std::function<void(int64_t)> task;
  std::function<int64_t()> recount = nullptr;  // in a recorded step: how many tasks there are this time
};

using Work = std::vector<Stage>;

// A layer's storage as its attentions were recorded, and where it lies for each row. `reach`: how many positions, its
// own included, a token of it may see; 0: nothing attends to it.
struct LiveLayer {
  int64_t heads = 0, key_dim = 0, value_dim = 0, reach = 0;
  std::vector<Span> spans;
};

// What changes from step to step of a recording: which rows its tokens are of, and where a layer's keys and values are.
struct LiveRows {
  size_t num_tokens = 0;
  Type type = Type::float32;
  std::vector<LiveLayer> layers;
};

// Floats that a call needs besides its inputs and outputs. Calls that need the very same ones share them.
class Shelf {
 public:
  using Key = std::tuple<const void*, const void*, std::vector<int64_t>, std::array<float, 2>>;

  // `count` floats for what `key` says; `made` tells whether an earlier call fills them, in its stages of depth 0.
  float* shared(const Key& key, int64_t count, bool& made) {
    auto [found, is_new] = shared_.try_emplace(key, nullptr, level);
    made = !is_new;
    if (is_new) found->second.first = own(count);
    level = std::max(level, found->second.second);
    touched.push_back(found->second.first);
    return found->second.first;
  }

  float* own(int64_t count) {
    mx::array floats(mx::Shape{}, mx::float32, nullptr, {});  // only its memory counts, which may pass an int
    size_t bytes = count * sizeof(float) + kAlignment;
    arena ? arena->take(floats, level, bytes) : floats.set_data(mx::allocator::malloc(bytes));
    kept_.push_back(floats);
    touched.push_back(aligned(kept_.back().data<float>()));
    return touched.back();
  }

  Arena* arena = nullptr;                         // of a recorded step
  std::vector<float*> touched;                    // what the call uses
  LiveRows* rows = nullptr;                       // whose keys and values a recorded step finds; null elsewhere
  std::vector<std::function<void()>> before_run;  // what a recorded step does once its rows are known
  int level = 0;  // when a recorded step can do the call's stages of depth 0; raised by what is shared

 private:
  std::map<Key, std::pair<float*, int>> shared_;
  std::vector<mx::array> kept_;
};

// A primitive of the CPU alone, whose call is Work.
class Kernel : public mx::Primitive {
 public:
  using Primitive::Primitive;

  // The work of one call; memory of inputs and outputs is there, but the inputs' values are not yet.
  virtual Work work(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, Shelf& shelf) = 0;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    for (mx::array& out : outputs) allocate(out);
    auto shelf = std::make_shared<Shelf>();
    Work stages = work(inputs, outputs, *shelf);
    mx::cpu::get_command_encoder(stream()).dispatch([stages = std::move(stages), shelf] {
      for (const Stage& stage : stages) share(stage.count, stage.task);
    });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("the compiled kernels run on the CPU alone");
  }
};

}  // namespace mlxcel
