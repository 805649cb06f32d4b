#include "program.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include "attend.h"
#include "levels.h"
#include "mlx/transforms.h"
#include "mlx/utils.h"
#include "work.h"

namespace mlxcel {

namespace {

// Work below this many multiplications is done by one thread while the others wait: handing it over costs more.
constexpr int64_t kSoloCost = 32 * 1024;

// Attention in a recording: what it has to do is known when the rows are.
class AttendInProgram : public Kernel {
 public:
  AttendInProgram(mx::Stream stream, int layer, float scale, int64_t window, bool appends, bool has_sinks)
      : Kernel(stream), layer_(layer), scale_(scale), window_(window), appends_(appends), has_sinks_(has_sinks) {}

  Work work(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, Shelf& shelf) override {
    if (!shelf.rows) throw std::runtime_error("this attention runs in a recorded step alone");
    admit(*shelf.rows, inputs);
    Attention call{};
    call.num_heads = inputs[0].shape(1);
    call.num_key_heads = inputs[1].shape(1);
    call.key_dim = inputs[1].shape(3);
    call.value_dim = inputs[2].shape(3);
    call.window = window_;
    call.scale = scale_;
    call.queries = heads(inputs[0]);
    if (appends_) {
      call.keys = heads(inputs[1]);
      call.values = heads(inputs[2]);
    }
    call.out = outputs[0].data<float>();
    if (has_sinks_) call.sinks = inputs[3].data<float>();

    auto attend = std::make_shared<AttendWork>();
    shelf.before_run.push_back([call, attend, rows = shelf.rows, layer = layer_]() mutable {
      call.type = rows->type;
      attend->prepare(call, rows->layers[layer].spans);
    });
    int64_t few = inputs[0].shape(0) * call.num_heads * call.value_dim;
    return {{0, 0, 0, [attend](int64_t i) { attend->append(i); }, [attend] { return attend->num_appends(); }},
            {1, 0, kSoloCost, [attend](int64_t i) { attend->run(i); }, [attend] { return attend->num_tasks(); }},
            {2, 0, few, [attend](int64_t i) { attend->merge(i); }, [attend] { return attend->num_merges(); }}};
  }

  const char* name() const override { return "MlxcelAttendInProgram"; }

 private:
  static Heads heads(const mx::array& x) {
    Rows rows(x);
    expect(rows.dense || rows.strides.back() == 1, "the values of a head lie apart");
    if (rows.dense) return {rows.data, {x.shape(1) * rows.length, rows.length}};
    return {rows.data, {rows.strides[0], rows.strides[1]}};
  }

  // Notes what storage this attention can read.
  void admit(LiveRows& live, const std::vector<mx::array>& inputs) const {
    const mx::array &keys = inputs[1], &values = inputs[2];
    expect(keys.shape(0) == int(live.num_tokens) && layer_ >= 0 && layer_ < int(live.layers.size()),
           "an attention has other tokens or layers than the step");
    LiveLayer& layer = live.layers[layer_];
    expect(!layer.reach || (layer.heads == keys.shape(1) && layer.key_dim == keys.shape(3) &&
                            layer.value_dim == values.shape(3)),
           "attentions of one layer are unlike");
    layer.heads = keys.shape(1);
    layer.key_dim = keys.shape(3);
    layer.value_dim = values.shape(3);
    layer.reach = std::max(layer.reach, window_ ? window_ : std::numeric_limits<int64_t>::max());
  }

  int layer_;
  float scale_;
  int64_t window_;
  bool appends_, has_sinks_;
};

// a + b and its like over rows; either may repeat along any axis.
template <class Operation>
Work binary(const mx::array& a, const mx::array& b, mx::array& out, Operation operation) {
  Rows left(a), right(b);
  float* y = out.data<float>();
  auto task = [=](int64_t) {
    int64_t left_step = left.dense ? 1 : left.strides.back(), right_step = right.dense ? 1 : right.strides.back();
    for (int64_t row = 0; row < left.count; row++) {
      const float *l = left.at(row), *r = right.at(row);
      float* to = y + row * left.length;
      if (left_step == 1 && right_step == 1)
        for (int64_t i = 0; i < left.length; i++) to[i] = operation(l[i], r[i]);
      else
        for (int64_t i = 0; i < left.length; i++) to[i] = operation(l[i * left_step], r[i * right_step]);
    }
  };
  return {{0, 1, int64_t(out.size()), task}};
}

// The elements of `from` in the order of its axes.
Work copy(const mx::array& from, mx::array& out) {
  Rows rows(from);
  float* y = out.data<float>();
  auto task = [=](int64_t) {
    for (int64_t row = 0; row < rows.count; row++) rows.copy(row, y + row * rows.length);
  };
  return {{0, 1, int64_t(out.size()), task}};
}

bool is_float(const mx::array& a) { return a.dtype() == mx::float32 && a.ndim() > 0; }

// An output of `node`, without memory yet. MLX's operations ask it for its primitive.
mx::array blank(const mx::array& like, const mx::array& node) {
  return mx::array(like.shape(), like.dtype(), node.primitive_ptr(), {});
}

bool share_memory(const mx::array& a, const mx::array& b) { return a.data_shared_ptr() == b.data_shared_ptr(); }

}  // namespace

class Program::Recorded {
 public:
  Recorded(const mx::array& ids, const mx::array& positions, const mx::array& result, int num_layers)
      : ids_(filled(ids)), positions_(filled(positions)), result_(result) {
    live_.num_tokens = positions.size();
    live_.layers.resize(num_layers);
    expect(ids.dtype() == mx::int32 && positions.dtype() == mx::int32, "ids and positions are int32");
    for (bool planned : {false, true}) {
      known_.clear();
      stages_.clear();
      shelf_ = {};
      shelf_.rows = &live_;
      shelf_.arena = &arena_;
      known_.emplace(ids.id(), Value{ids_, 0});
      known_.emplace(positions.id(), Value{positions_, 0});
      record(result);
      expect(known_.count(result.id()) > 0 && known_.at(result.id()).level > 0, "the result does not follow from ids");
      result_ = known_.at(result.id()).array;
      arena_.keep(result_.data<char>());
      if (!planned) arena_.plan();
    }
    expect(is_float(result_) && result_.flags().row_contiguous, "the result is dense and float32");
    arrange();
  }

  mx::array run(const std::vector<int32_t>& ids, const std::vector<int32_t>& positions, const Storage& storage) {
    std::lock_guard lock(running_);
    place(ids, positions, storage);
    for (Phase& phase : phases_) phase.next = phase.done = 0;
    fault_ = nullptr;
    share(num_threads(), [this](int64_t thread) { take_part(thread == 0); });
    if (fault_) std::rethrow_exception(fault_);
    mx::array out(result_.shape(), mx::float32, nullptr, {});
    std::memcpy(allocate(out), result_.data<float>(), out.nbytes());
    out.set_status(mx::array::Status::available);
    return out;
  }

  std::map<std::string, std::pair<int, double>> profile(const std::vector<int32_t>& ids,
                                                        const std::vector<int32_t>& positions, const Storage& storage) {
    place(ids, positions, storage);
    std::map<std::string, std::pair<int, double>> times;
    for (Phase& phase : phases_)
      for (size_t i = 0; i < phase.stages.size(); i++) {
        auto started = std::chrono::steady_clock::now();
        for (int64_t task = 0; task < phase.stages[i].count; task++) phase.stages[i].task(task);
        auto& [count, seconds] = times[phase.names[i]];
        count++;
        seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
      }
    return times;
  }

  int num_phases() const { return int(phases_.size()); }
  std::vector<std::string> foreign() const { return {foreign_names_.begin(), foreign_names_.end()}; }

 private:
  struct Value {
    mx::array array;
    int level;  // of the stage that makes it; 0: it is there from the start
  };

  // MLX's own operation: it runs on the calling thread, which waits for its stream.
  struct Foreign {
    mx::array node;
    std::vector<mx::array> inputs, outputs;

    void run() const {
      std::vector<mx::array> made;
      for (const mx::array& out : outputs) made.push_back(blank(out, node));
      node.primitive().eval_cpu(inputs, made);
      mx::synchronize(node.primitive().stream());
      for (size_t i = 0; i < made.size(); i++) {
        if (made[i].strides() != outputs[i].strides() || made[i].data_size() != outputs[i].data_size())
          throw std::runtime_error("an operation laid its result out in another way than when it was recorded");
        char* to = const_cast<char*>(outputs[i].data<char>());
        std::memcpy(to, made[i].data<char>(), made[i].data_size() * made[i].itemsize());
      }
    }
  };

  struct Placed {
    Stage stage;
    int level;
    bool by_caller;
    std::string name;
  };

  // What runs between two meetings of the threads: tasks that any may take, or stages that one does in turn.
  struct alignas(64) Phase {
    std::vector<Stage> stages;
    std::vector<std::string> names;  // of the operations that the stages are part of
    int64_t count = 0;  // tasks; 1 where one thread does all
    bool solo = false, by_caller = false;
    std::atomic<int64_t> next{0}, done{0};

    Phase() = default;
    Phase(Phase&& other) noexcept
        : stages(std::move(other.stages)), names(std::move(other.names)), count(other.count), solo(other.solo), by_caller(other.by_caller) {}

    // Tasks of work that the rows decide on are counted anew for each step.
    void recount() {
      if (std::none_of(stages.begin(), stages.end(), [](const Stage& stage) { return bool(stage.recount); })) return;
      int64_t all = 0;
      for (Stage& stage : stages) {
        if (stage.recount) stage.count = stage.recount();
        all += stage.count;
      }
      if (!solo) count = all;
    }

    void run(int64_t task) {
      if (solo) {
        for (Stage& stage : stages)
          for (int64_t i = 0; i < stage.count; i++) stage.task(i);
        return;
      }
      size_t stage = 0;
      for (; task >= stages[stage].count; stage++) task -= stages[stage].count;
      stages[stage].task(task);
    }
  };

  static mx::array filled(const mx::array& like) {
    mx::array array(like.shape(), like.dtype(), nullptr, {});
    allocate(array);
    std::memset(array.data<char>(), 0, array.nbytes());
    array.set_status(mx::array::Status::available);
    return array;
  }

  // Walks from the result to what it follows from, and plays everything once, on zeros, from there.
  void record(const mx::array& result) {
    std::vector<mx::array> order = ordered(result);
    std::unordered_set<std::uintptr_t> follows;
    std::vector<mx::array> constants;
    for (const mx::array& node : order) {
      bool any = known_.count(node.id()) > 0;
      for (const mx::array& input : node.inputs()) any = any || follows.count(input.id()) > 0;
      if (any) follows.insert(node.id());
      if (any)
        for (const mx::array& input : node.inputs())
          if (!follows.count(input.id())) constants.push_back(input);
    }
    mx::eval(constants);
    for (const mx::array& constant : constants) known_.emplace(constant.id(), Value{constant, 0});
    for (const mx::array& node : order)
      if (follows.count(node.id()) && !known_.count(node.id())) play(node);
  }

  std::vector<mx::array> ordered(const mx::array& result) const {
    std::vector<mx::array> order;
    std::unordered_set<std::uintptr_t> seen;
    std::vector<std::pair<mx::array, size_t>> path{{result, 0}};
    seen.insert(result.id());
    while (!path.empty()) {
      auto& [node, next] = path.back();
      const auto& inputs = node.inputs();
      if (node.has_primitive() && next < inputs.size()) {
        const mx::array& input = inputs[next++];
        if (seen.insert(input.id()).second) path.emplace_back(input, 0);
        continue;
      }
      order.push_back(node);
      path.pop_back();
    }
    return order;
  }

  void play(const mx::array& node) {
    expect(node.has_primitive(), "something is neither computed nor an input");
    std::vector<mx::array> inputs;
    int level = 0;
    for (const mx::array& input : node.inputs()) {
      const Value& value = known_.at(input.id());
      inputs.push_back(value.array);
      level = std::max(level, value.level);
    }
    std::vector<mx::array> nodes = node.outputs(), outputs;
    for (const mx::array& out : nodes) outputs.push_back(blank(out, node));
    Work work;
    shelf_.level = level + 1;
    if (std::optional<Work> ours = own_work(node, inputs, outputs)) {
      work = std::move(*ours);
    } else {
      node.primitive().eval_cpu(inputs, outputs);
      mx::synchronize(node.primitive().stream());
      bool views = true;
      for (mx::array& out : outputs) {
        out.set_status(mx::array::Status::available);
        views = views && std::any_of(inputs.begin(), inputs.end(), [&](const mx::array& in) { return share_memory(in, out); });
      }
      if (!views) {
        if (is_layout(node) && is_float(outputs[0]) && is_float(inputs[0]) && outputs[0].flags().row_contiguous) {
          outputs[0] = blank(nodes[0], node);
          arena_.take(outputs[0], level + 1);
          work = copy(inputs[0], outputs[0]);
        } else {
          Foreign foreign{node, inputs, outputs};
          std::string name = node.primitive().name();
          foreign_names_.insert(name);
          stages_.push_back({{0, 1, 0, [foreign](int64_t) { foreign.run(); }}, level + 1, true, name});
          level++;
        }
      }
    }
    int base = shelf_.level;
    std::string name = node.primitive().name();
    for (Stage& stage : work) {
      level = std::max(level, base + stage.depth);
      int at = base + stage.depth;
      stages_.push_back({std::move(stage), at, false, stage.depth < work.back().depth ? "before " + name : name});
    }
    for (const mx::array& input : inputs) arena_.use(input.data<char>(), level);
    for (const float* floats : shelf_.touched) arena_.use(floats, level);
    shelf_.touched.clear();
    for (size_t i = 0; i < nodes.size(); i++) known_.insert_or_assign(nodes[i].id(), Value{outputs[i], level});
  }

  // The work of an operation that is ours, or so simple that ours gives the same bits.
  std::optional<Work> own_work(const mx::array& node, const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
    auto prepare = [&] {
      for (mx::array& out : outputs) arena_.take(out, shelf_.level);
    };
    if (auto* kernel = dynamic_cast<Kernel*>(&node.primitive())) {
      prepare();
      return kernel->work(inputs, outputs, shelf_);
    }
    std::string name = node.primitive().name();
    // What a model compiled that comes to one operation.
    constexpr std::string_view alone = "CompiledBroadcastBroadcast";
    if (name.starts_with(alone)) name = name.substr(alone.size());
    if (inputs.size() != 2 || !is_float(outputs[0]) || inputs[0].dtype() != mx::float32 ||
        inputs[1].dtype() != mx::float32 || inputs[0].shape() != outputs[0].shape() ||
        inputs[1].shape() != outputs[0].shape())
      return std::nullopt;
    auto make = [&](auto operation) {
      prepare();
      return binary(inputs[0], inputs[1], outputs[0], operation);
    };
    if (name == "Add") return make([](float a, float b) { return a + b; });
    if (name == "Subtract") return make([](float a, float b) { return a - b; });
    if (name == "Multiply") return make([](float a, float b) { return a * b; });
    if (name == "Divide") return make([](float a, float b) { return a / b; });
    return std::nullopt;
  }

  static bool is_layout(const mx::array& node) {
    static const std::set<std::string> names{"Reshape", "Flatten", "Unflatten", "Contiguous", "Copy"};
    return node.inputs().size() == 1 && names.count(node.primitive().name()) > 0;
  }

  void arrange() {
    std::stable_sort(stages_.begin(), stages_.end(),
                     [](const Placed& a, const Placed& b) { return a.level < b.level; });
    for (size_t i = 0; i < stages_.size();) {
      size_t end = i;
      int64_t cost = 0;
      bool by_caller = false;
      for (; end < stages_.size() && stages_[end].level == stages_[i].level; end++) {
        cost += stages_[end].stage.cost;
        by_caller = by_caller || stages_[end].by_caller;
      }
      bool solo = by_caller || cost < kSoloCost;
      if (phases_.empty() || !solo || !phases_.back().solo) {
        phases_.emplace_back();
        phases_.back().solo = solo;
        phases_.back().count = solo ? 1 : 0;
      }
      Phase& phase = phases_.back();
      phase.by_caller = phase.by_caller || by_caller;
      for (; i < end; i++) {
        if (!solo) phase.count += stages_[i].stage.count;
        phase.stages.push_back(std::move(stages_[i].stage));
        phase.names.push_back(std::move(stages_[i].name));
      }
    }
    stages_.clear();
  }

  void place(const std::vector<int32_t>& ids, const std::vector<int32_t>& positions, const Storage& storage) {
    size_t tokens = live_.num_tokens;
    expect(ids.size() == tokens && positions.size() == tokens, "a step takes as many tokens as were recorded");
    std::copy(ids.begin(), ids.end(), ids_.data<int32_t>());
    std::copy(positions.begin(), positions.end(), positions_.data<int32_t>());
    mx::Dtype type = storage.arrays.empty() ? mx::float32 : storage.arrays[0].dtype();
    expect(type == mx::float32 || type == mx::float16 || type == mx::bfloat16, "storage is of a float type");
    live_.type = type == mx::float32 ? Type::float32 : type == mx::float16 ? Type::float16 : Type::bfloat16;
    for (const mx::array& each : storage.arrays)
      expect(each.is_available() && each.dtype() == type && each.flags().row_contiguous && each.ndim() == 4,
             "a row's storage lies densely and is all of one type");
    std::vector<Span> rows = rows_of(positions, storage.counts);
    for (LiveLayer& layer : live_.layers) layer.spans = rows;
    storage.tables.empty() ? place_dense(storage) : place_paged(storage);
    for (auto& prepare : shelf_.before_run) prepare();
    for (Phase& phase : phases_) phase.recount();
  }

  // Which tokens of the step are whose, without storage yet.
  static std::vector<Span> rows_of(const std::vector<int32_t>& positions, const std::vector<int64_t>& counts) {
    std::vector<Span> rows;
    int64_t start = 0, tokens = positions.size(), num_rows = counts.empty() ? tokens : counts.size();
    for (int64_t row = 0; row < num_rows; row++) {
      int64_t count = counts.empty() ? 1 : counts[row];
      expect(count > 0 && count <= tokens - start, "the rows have other tokens than the step");
      rows.push_back({start, count, positions[start], 0, nullptr, nullptr, 0, nullptr});
      for (int64_t i = 1; i < count; i++)
        expect(positions[start + i] == positions[start] + i, "the tokens of a row follow each other");
      start += count;
    }
    expect(start == tokens, "the rows have other tokens than the step");
    return rows;
  }

  void place_dense(const Storage& storage) {
    size_t rows = live_.layers.empty() ? 0 : live_.layers[0].spans.size(), pairs = rows * live_.layers.size();
    expect(storage.bases.size() == pairs && storage.arrays.size() == 2 * pairs,
           "a step takes as many layers as were recorded");
    for (size_t i = 0; i < pairs; i++) {
      const mx::array &keys = storage.arrays[2 * i], &values = storage.arrays[2 * i + 1];
      place(live_.layers[i / rows], i % rows, storage.bases[i], keys, values, keys.shape(2), nullptr);
    }
  }

  void place_paged(const Storage& storage) {
    size_t layers = live_.layers.size(), rows = layers ? live_.layers[0].spans.size() : 0;
    expect(rows > 0 && storage.groups.size() == layers && storage.arrays.size() == 2 * layers &&
               storage.tables.size() == storage.bases.size() && storage.tables.size() % rows == 0,
           "a step takes as many layers as were recorded, and a table of each row for each group of them");
    for (size_t i = 0; i < layers; i++) {
      const mx::array &keys = storage.arrays[2 * i], &values = storage.arrays[2 * i + 1];
      expect(keys.shape(2) % kPage == 0, "a pool is of whole blocks");
      for (size_t row = 0; row < rows; row++) {
        size_t at = storage.groups[i] * rows + row;
        expect(storage.groups[i] >= 0 && at < storage.tables.size(), "a layer is of a group that has no tables");
        const Storage::Table& table = storage.tables[at];
        int64_t base = storage.bases[at];
        expect(base % kPage == 0, "a table begins with a whole block");
        // Checked once for a group: its pools are of one size, or this one is smaller.
        if (i == 0 || storage.groups[i] != storage.groups[i - 1] || keys.shape(2) < storage.arrays[2 * i - 2].shape(2))
          for (int64_t block = 0; block < table.count; block++)
            expect(table.blocks[block] >= 0 && table.blocks[block] < keys.shape(2) / kPage,
                   "a table names a block that the pool does not have");
        place(live_.layers[i], row, base, keys, values, table.count * kPage, table.blocks);
      }
    }
  }

  static void place(LiveLayer& layer, int64_t row, int64_t base, const mx::array& keys, const mx::array& values,
                    int64_t capacity, const int32_t* table) {
    expect(keys.shape(0) == 1 && values.shape(0) == 1 && keys.shape(2) == values.shape(2) &&
               (!layer.reach || (keys.shape(1) == layer.heads && values.shape(1) == layer.heads &&
                                 keys.shape(3) == layer.key_dim && values.shape(3) == layer.value_dim)),
           "a row's storage has another shape than its keys and values");
    Span& span = layer.spans[row];
    expect(base >= 0 && base <= span.position && span.position + span.count - base <= capacity,
           "a row's storage has no room for its next tokens");
    expect(base <= std::max<int64_t>(0, span.position + 1 - layer.reach), "a row's storage begins after what it sees");
    span.base = base;
    // The data is written to, whoever else refers to it.
    span.keys = const_cast<char*>(keys.data<char>());
    span.values = const_cast<char*>(values.data<char>());
    span.capacity = keys.shape(2);
    span.table = table;
  }

  void take_part(bool is_caller) {
    for (Phase& phase : phases_) {
      if (!phase.by_caller || is_caller) {
        int64_t ran = 0;
        for (int64_t i = phase.next++; i < phase.count; i = phase.next++, ran++) {
          try {
            phase.run(i);
          } catch (...) {
            std::lock_guard lock(faults_);
            fault_ = std::current_exception();
          }
        }
        if (ran) phase.done += ran;
      }
      // Where the caller waits for a thread of MLX, that one gets this processor.
      int patience = phase.by_caller ? 0 : 2000;
      for (int turn = 0; phase.done < phase.count; turn++) turn < patience ? pause() : std::this_thread::yield();
    }
  }

  mx::array ids_, positions_, result_;
  LiveRows live_;
  Arena arena_;
  Shelf shelf_;
  std::unordered_map<std::uintptr_t, Value> known_;
  std::vector<Placed> stages_;
  std::vector<Phase> phases_;
  std::set<std::string> foreign_names_;
  std::mutex running_, faults_;
  std::exception_ptr fault_;
};

Program::Program(const mx::array& ids, const mx::array& positions, const mx::array& result, int num_layers)
    : recorded_(std::make_unique<Recorded>(ids, positions, result, num_layers)) {}
Program::~Program() = default;

mx::array Program::run(const std::vector<int32_t>& ids, const std::vector<int32_t>& positions, const Storage& storage) {
  return recorded_->run(ids, positions, storage);
}

std::map<std::string, std::pair<int, double>> Program::profile(const std::vector<int32_t>& ids,
                                                               const std::vector<int32_t>& positions,
                                                               const Storage& storage) {
  return recorded_->profile(ids, positions, storage);
}

int Program::num_phases() const { return recorded_->num_phases(); }
std::vector<std::string> Program::foreign() const { return recorded_->foreign(); }

mx::array attend_in_program(const mx::array& queries, const mx::array& keys, const mx::array& values, bool appends,
                            int layer, float scale, int64_t window, const std::optional<mx::array>& sinks) {
  mx::Stream stream = mx::default_stream(mx::Device::cpu);
  expect(queries.ndim() == 4 && keys.ndim() == 4 && values.ndim() == 4 && queries.dtype() == mx::float32 &&
             keys.dtype() == mx::float32 && values.dtype() == mx::float32 && queries.shape(2) == 1 &&
             keys.shape(0) == queries.shape(0) && keys.shape(3) == queries.shape(3) && keys.shape(2) == 1 &&
             values.shape(0) == keys.shape(0) && values.shape(1) == keys.shape(1) && values.shape(2) == 1 &&
             keys.shape(1) > 0 && queries.shape(1) % keys.shape(1) == 0 && keys.shape(3) > 0 && values.shape(3) > 0 &&
             keys.shape(3) <= kMaxHeadDim && values.shape(3) <= kMaxHeadDim,
         "queries, keys and values are [rows, heads, 1, dim] and fit each other");
  expect(window >= 0, "a window is a number of positions");
  expect(!sinks || sinks->shape() == mx::Shape({queries.shape(1)}), "attend takes one sink for each head");
  std::vector<mx::array> inputs{queries, keys, values};
  if (sinks) inputs.push_back(dense(wide(*sinks, stream), stream));
  mx::Shape shape = queries.shape();
  shape.back() = values.shape(3);
  auto primitive = std::make_shared<AttendInProgram>(stream, layer, scale, window, appends, sinks.has_value());
  return mx::array(std::move(shape), mx::float32, std::move(primitive), std::move(inputs));
}

}  // namespace mlxcel
