#include "gather.h"

#include <limits>

#include "levels.h"
#include "product.h"

namespace mlxcel {

namespace {

// Steps through `a` as if its leading axes had been broadcast to those of `shape`.
mx::Strides broadcast_strides(const mx::array& a, const mx::Shape& shape) {
  mx::Strides strides(shape.size(), 0);
  size_t missing = shape.size() - a.ndim();
  for (size_t axis = 0; axis < a.ndim(); axis++)
    if (a.shape(axis) != 1) strides[missing + axis] = a.strides()[axis];
  return strides;
}

mx::Shape leading(const mx::array& x) { return mx::Shape(x.shape().begin(), x.shape().end() - 2); }

mx::Shape output_shape(const mx::array& x, const mx::array& weight, const mx::array& indices) {
  mx::Shape shape = mx::broadcast_shapes(leading(x), indices.shape());
  shape.push_back(x.shape(-2));
  shape.push_back(weight.shape(-2));
  return shape;
}

// The chosen experts, in the order of the output.
struct Choices {
  Indices indices;
  mx::Shape shape;
  mx::Strides strides;

  // -1 for what is no expert.
  int64_t at(int64_t i, int64_t num_experts) const {
    int64_t offset = 0;
    for (int axis = int(shape.size()) - 1; axis >= 0; axis--) {
      offset += i % shape[axis] * strides[axis];
      i /= shape[axis];
    }
    int64_t expert = indices.at(offset);
    return expert < num_experts ? std::max<int64_t>(expert, -1) : -1;
  }
};

// Rows [first, first + count) of those that are in order all meet `expert`.
struct Group {
  int64_t expert, first, count;
};

// Rows sorted by their experts, so that each expert's weights are gone through once.
struct Grouped {
  std::vector<int64_t> order;
  std::vector<Group> groups;
  std::vector<int64_t> strays;  // rows without an expert

  void sort(const Choices& choices, int64_t num_choices, int64_t rows_each, int64_t num_experts) {
    groups.clear();
    strays.clear();
    std::vector<int64_t> experts(num_choices), next(num_experts, 0);
    for (int64_t i = 0; i < num_choices; i++) {
      experts[i] = choices.at(i, num_experts);
      if (experts[i] >= 0) next[experts[i]] += rows_each;
    }
    int64_t total = 0;
    for (int64_t expert = 0; expert < num_experts; expert++) {
      int64_t count = next[expert];
      if (count) groups.push_back({expert, total, count});
      next[expert] = total;
      total += count;
    }
    order.resize(total);
    for (int64_t i = 0; i < num_choices; i++)
      for (int64_t row = i * rows_each; row < (i + 1) * rows_each; row++)
        experts[i] < 0 ? strays.push_back(row) : void(order[next[experts[i]]++] = row);
  }
};

// What lies between one expert's weights and the next one's.
struct Apart {
  int64_t weight_bytes, scale_bytes, columns;

  Linear of(Linear call, int64_t expert) const {
    call.weight = static_cast<const char*>(call.weight) + expert * weight_bytes;
    if (call.bits) {
      call.scales = static_cast<const char*>(call.scales) + expert * scale_bytes;
      call.biases = static_cast<const char*>(call.biases) + expert * scale_bytes;
    }
    if (call.bias) call.bias += expert * columns;
    return call;
  }
};

// How many groups there can be, and what they are once the choices are known.
Work work_of(const Rows& rows, const Choices& choices, int64_t rows_each, int64_t num_experts, const Apart& apart,
             Linear call, Shelf& shelf) {
  int64_t num_choices = rows.count / rows_each, most = std::min(num_choices, num_experts);
  auto grouped = std::make_shared<Grouped>();
  float* x = shelf.own(rows.count * call.row_stride);
  auto group = [=](int64_t) {
    grouped->sort(choices, num_choices, rows_each, num_experts);
    for (int64_t row : grouped->strays)
      std::fill_n(call.y + row * call.num_columns, call.num_columns, std::numeric_limits<float>::quiet_NaN());
  };
  auto lay_group_out = [=](int64_t task) {
    if (task >= int64_t(grouped->groups.size())) return;
    const Group& group = grouped->groups[task];
    Linear one = call;
    one.num_rows = group.count;
    for (int64_t i = 0; i < group.count; i++)
      lay_out(rows, grouped->order[group.first + i], one, i, x + group.first * call.row_stride);
  };
  call.num_rows = num_experts ? (rows.count + num_experts - 1) / num_experts : 1;
  int64_t columns = columns_per_task(call, most), pieces = (call.num_columns + columns - 1) / columns;
  auto multiply = [=](int64_t task) {
    if (task / pieces >= int64_t(grouped->groups.size())) return;
    const Group& group = grouped->groups[task / pieces];
    int64_t first = task % pieces * columns;
    Linear one = apart.of(call, group.expert);
    one.x = x + group.first * call.row_stride;
    one.places = grouped->order.data() + group.first;
    one.num_rows = group.count;
    level().linear(one, first, std::min(call.num_columns, first + columns), scratch(scratch_floats(one)));
  };
  int64_t cost = rows.count * call.num_columns * call.row_stride;
  return {{0, 1, num_choices, group},
          {1, most, rows.count * call.row_stride, lay_group_out},
          {2, most * pieces, cost, multiply}};
}

class GatherLinear : public Kernel {
 public:
  GatherLinear(mx::Stream stream, Packing how) : Kernel(stream), how_(how) {}

  Work work(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, Shelf& shelf) override {
    mx::array& out = outputs[0];
    if (out.size() == 0) return {};
    const mx::array &x = inputs[0], &indices = inputs[1], &weight = inputs[2];
    Linear call = product_of(inputs, 2, how_);
    call.y = out.data<float>();
    Apart apart{call.num_columns * weight.shape(-1) * int64_t(weight.itemsize()),
                how_.bits ? call.num_columns * inputs[3].shape(-1) * int64_t(inputs[3].itemsize()) : 0,
                call.num_columns};
    Rows rows(x);
    rows.shape = out.shape();
    rows.shape.back() = x.shape(-1);
    rows.strides = broadcast_strides(x, rows.shape);
    rows.dense = false;
    mx::Shape batch = leading(out);
    Choices choices{Indices(indices), batch, broadcast_strides(indices, batch)};
    rows.count = int64_t(out.size()) / call.num_columns;
    return work_of(rows, choices, x.shape(-2), weight.shape(0), apart, call, shelf);
  }

  const char* name() const override { return "MlxcelGatherLinear"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return static_cast<const GatherLinear&>(other).how_ == how_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {output_shape(inputs[0], inputs[2], inputs[1])};
  }

 private:
  Packing how_;
};

}  // namespace

mx::array gather_linear(const mx::array& x, const mx::array& weight, const mx::array& indices,
                        const std::optional<mx::array>& scales, const std::optional<mx::array>& biases,
                        const std::optional<mx::array>& bias, int group_size, int bits) {
  mx::Stream stream = mx::default_stream(mx::Device::cpu);
  expect(x.ndim() >= 2 && weight.ndim() == 3, "gather_linear takes x [..., rows, inputs] and a weight of three axes");
  expect(mx::issubdtype(indices.dtype(), mx::integer), "indices are whole numbers");
  std::vector<mx::array> inputs{wide(x, stream), Indices::readable(indices, stream)};
  append_weight(inputs, x.shape(-1), weight, scales, biases, bias, group_size, bits, stream);
  auto primitive = std::make_shared<GatherLinear>(stream, Packing{group_size, bits, bias.has_value()});
  return mx::array(output_shape(x, weight, indices), mx::float32, std::move(primitive), std::move(inputs));
}

}  // namespace mlxcel
