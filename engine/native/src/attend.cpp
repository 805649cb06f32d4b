#include "attend.h"

#include <algorithm>
#include <functional>

#include "arrays.h"
#include "levels.h"
#include "pool.h"

namespace mlxcel {

namespace {

// Products of queries and keys below which handing over to other threads costs more than it saves.
constexpr int64_t kSharedProducts = 2048;
// Queries, those of each head counted, that one task goes through a block of keys with.
constexpr int64_t kTaskRows = 64;
constexpr int64_t kAppendTokens = 64;

// `x` [tokens, heads, 1, dim] as the kernels read it. Values that lie apart are laid out anew, which no model at hand
// needs.
class Laid {
 public:
  Laid(const mx::array& x, int64_t heads) : rows_(x), heads_(heads) {}

  Heads heads() {
    if (rows_.dense) return {rows_.data, {heads_ * rows_.length, rows_.length}};
    if (rows_.strides.back() == 1) return {rows_.data, {rows_.strides[0], rows_.strides[1]}};
    copy_.resize(rows_.count * rows_.length);
    for (int64_t row = 0; row < rows_.count; row++)
      rows_.lay_out(row, rows_.length, false, copy_.data() + row * rows_.length);
    return {copy_.data(), {heads_ * rows_.length, rows_.length}};
  }

 private:
  Rows rows_;
  int64_t heads_;
  std::vector<float> copy_;
};

void each(int64_t count, bool shared, const std::function<void(int64_t)>& task) {
  if (shared && count > 1) return share(count, task);
  for (int64_t i = 0; i < count; i++) task(i);
}

void complete(AttendWork& work) {
  bool shared = work.is_large();
  each(work.num_appends(), shared, [&](int64_t i) { work.append(i); });
  each(work.num_tasks(), shared, [&](int64_t i) { work.run(i); });
  each(work.num_merges(), shared, [&](int64_t i) { work.merge(i); });
}

class Attend : public CpuPrimitive {
 public:
  Attend(mx::Stream stream, std::vector<SpanPlace> places, float scale, int64_t window, bool appends, bool has_sinks)
      : CpuPrimitive(stream), places_(std::move(places)), scale_(scale), window_(window), appends_(appends),
        has_sinks_(has_sinks) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    size_t at = appends_ ? 3 : 1;
    Attention call{};
    if (has_sinks_) call.sinks = inputs[at++].data<float>();
    call.num_heads = inputs[0].shape(1);
    call.out = allocate(outputs[0]);
    call.num_key_heads = inputs[at].shape(1);
    call.key_dim = inputs[at].shape(3);
    call.value_dim = inputs[at + 1].shape(3);
    call.window = window_;
    call.scale = scale_;

    std::vector<Span> spans;
    for (size_t i = 0; i < places_.size(); i++) {
      auto [start, count, position, base] = places_[i];
      mx::array keys = inputs[at + 2 * i], values = inputs[at + 2 * i + 1];
      if (!keys.flags().row_contiguous || !values.flags().row_contiguous)
        throw std::runtime_error("attend: a row's storage does not lie densely");
      if (appends_) {
        outputs[1 + 2 * i].copy_shared_buffer(keys);
        outputs[2 + 2 * i].copy_shared_buffer(values);
      }
      spans.push_back({start, count, position, base, keys.data<float>(), values.data<float>(), keys.shape(2), nullptr});
    }
    std::vector<Laid> laid{Laid(inputs[0], call.num_heads)};
    for (int i = 1; appends_ && i < 3; i++) laid.emplace_back(inputs[i], call.num_key_heads);
    dispatch([call, spans = std::move(spans), laid = std::move(laid)]() mutable {
      call.queries = laid[0].heads();
      if (laid.size() > 1) {
        call.keys = laid[1].heads();
        call.values = laid[2].heads();
      }
      thread_local AttendWork work;
      work.prepare(call, spans);
      complete(work);
    });
  }

  const char* name() const override { return "MlxcelAttend"; }

 private:
  std::vector<SpanPlace> places_;
  float scale_;
  int64_t window_;
  bool appends_, has_sinks_;
};

bool is(const mx::array& a, int64_t first, int64_t second, int64_t third, int64_t fourth) {
  return a.ndim() == 4 && a.dtype() == mx::float32 && a.shape(0) == first && a.shape(1) == second &&
         a.shape(2) == third && a.shape(3) == fourth;
}

}  // namespace

void AttendWork::prepare(const Attention& call, const std::vector<Span>& spans) {
  call_ = call;
  spans_ = spans;
  appends_.clear();
  tasks_.clear();
  merges_.clear();
  num_partials_ = products_ = 0;
  for (const Span& span : spans_)
    if (span.count > 0) add(span);
  partials_.resize(num_partials_);
}

void AttendWork::add(const Span& span) {
  int64_t last = span.position + span.count - 1, keys = call_.window ? std::min(last + 1, call_.window) : last + 1;
  products_ += keys * span.count * call_.num_heads;
  int64_t tokens = std::max<int64_t>(1, kTaskRows / (call_.num_heads / call_.num_key_heads));
  auto part_of = [&](int64_t position) { return position / kPartKeys; };
  for (int64_t head = 0; head < call_.num_key_heads; head++) {
    if (span.count <= tokens) {
      add_parts(span, head, part_of(call_.first_key(span.position)), part_of(last));
      continue;
    }
    for (int64_t first = 0; call_.keys.data && first < span.count; first += kAppendTokens)
      appends_.push_back({{&span, head, first, std::min(span.count, first + kAppendTokens)}});
  }
  if (span.count <= tokens) return;
  // The last queries see the most keys; begun first, they do not keep the other threads waiting at the end.
  for (int64_t first = (span.count - 1) / tokens * tokens; first >= 0; first -= tokens)
    for (int64_t head = 0; head < call_.num_key_heads; head++) {
      int64_t until = std::min(span.count, first + tokens);
      tasks_.push_back({{&span, head, first, until, part_of(call_.first_key(span.position + first)),
                         part_of(span.position + until - 1)}});
    }
}

// Few queries: a task for each part, which can store what is new in it, for no other reads that.
void AttendWork::add_parts(const Span& span, int64_t key_head, int64_t first_part, int64_t last_part) {
  AttendTask all{&span, key_head, 0, span.count, first_part, last_part};
  if (first_part < last_part) merges_.push_back({all, num_partials_});
  for (int64_t part = first_part; part <= last_part; part++) {
    Task task{all, -1, call_.keys.data != nullptr};
    task.task.first_part = task.task.last_part = part;
    if (first_part < last_part) {
      task.partial = num_partials_;
      num_partials_ += span.count * (call_.num_heads / call_.num_key_heads) * partial_floats(call_);
    }
    tasks_.push_back(task);
  }
}

AttendTask AttendWork::with_partial(const Task& task) {
  AttendTask whole = task.task;
  if (task.partial >= 0) whole.partial = partials_.data() + task.partial;
  return whole;
}

void AttendWork::append(int64_t i) {
  const AttendTask& task = appends_[i].task;
  level().append(call_, *task.span, task.key_head, task.first, task.last);
}

void AttendWork::run(int64_t i) {
  AttendTask task = with_partial(tasks_[i]);
  if (tasks_[i].appends) {
    int64_t from = task.first_part * kPartKeys - task.span->position;
    int64_t first = std::max(task.first, from), last = std::min(task.last, from + kPartKeys);
    level().append(call_, *task.span, task.key_head, first, last);
  }
  level().attend(call_, task, scratch(scratch_floats(call_, task)));
}

void AttendWork::merge(int64_t i) {
  AttendTask task = with_partial(merges_[i]);
  level().merge(call_, task, scratch(scratch_floats(call_, task)));
}

bool AttendWork::is_large() const { return products_ >= kSharedProducts; }

std::vector<mx::array> attend(const mx::array& queries, const std::optional<mx::array>& keys,
                              const std::optional<mx::array>& values, const std::vector<mx::array>& storage,
                              const std::vector<SpanPlace>& places, float scale, int64_t window,
                              const std::optional<mx::array>& sinks) {
  mx::Stream stream = mx::default_stream(mx::Device::cpu);
  expect(!storage.empty() && storage.size() == 2 * places.size() && keys.has_value() == values.has_value(),
         "attend takes two arrays of storage for each span, and keys and values together");
  expect(storage[0].ndim() == 4 && storage[1].ndim() == 4, "storage has four axes");
  int64_t key_heads = storage[0].shape(1), key_dim = storage[0].shape(3), value_dim = storage[1].shape(3);
  expect(queries.ndim() == 4 && queries.shape(1) % std::max<int64_t>(1, key_heads) == 0 &&
             is(queries, queries.shape(0), queries.shape(1), 1, key_dim) && key_dim > 0 && value_dim > 0 &&
             key_dim <= kMaxHeadDim && value_dim <= kMaxHeadDim,
         "queries do not fit the storage");
  int64_t tokens = queries.shape(0);
  std::vector<mx::array> inputs{queries};
  if (keys) {
    expect(is(*keys, tokens, key_heads, 1, key_dim) && is(*values, tokens, key_heads, 1, value_dim),
           "keys and values do not fit the storage");
    inputs.push_back(*keys);
    inputs.push_back(*values);
  }
  if (sinks) {
    expect(sinks->shape() == mx::Shape({queries.shape(1)}), "attend takes one sink for each head");
    inputs.push_back(dense(wide(*sinks, stream), stream));
  }
  mx::Shape shape = queries.shape();
  shape.back() = int(value_dim);
  std::vector<mx::Shape> shapes{shape};
  for (size_t i = 0; i < places.size(); i++) {
    auto [start, count, position, base] = places[i];
    int64_t capacity = storage[2 * i].shape(2);
    expect(is(storage[2 * i], 1, key_heads, capacity, key_dim) && is(storage[2 * i + 1], 1, key_heads, capacity, value_dim),
           "the spans' storages are unlike");
    int64_t first = window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0;
    expect(start >= 0 && count >= 0 && start + count <= tokens && base >= 0 && base <= first &&
               position + count - base <= capacity,
           "a span lies outside of its tokens or storage");
    for (int64_t k = 0; k < 2; k++) {
      inputs.push_back(storage[2 * i + k]);
      if (keys) shapes.push_back(storage[2 * i + k].shape());
    }
  }
  std::vector<mx::Dtype> dtypes(shapes.size(), mx::float32);
  auto primitive =
      std::make_shared<Attend>(stream, places, scale, window, keys.has_value(), sinks.has_value());
  return mx::array::make_arrays(std::move(shapes), dtypes, primitive, inputs);
}

}  // namespace mlxcel
