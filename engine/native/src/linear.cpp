#include "linear.h"

#include "levels.h"
#include "product.h"

namespace mlxcel {

namespace {

void compute(const Rows& rows, Linear call) {
  bool lies_so = rows.dense && call.row_stride == rows.length && call.bits != 4;
  call.x = lies_so ? rows.data : lay_out(rows, rows.count, call, [](int64_t row) { return row; });
  int64_t columns = columns_per_task(call);
  const Level& now = level();
  share((call.num_columns + columns - 1) / columns, [&](int64_t task) {
    int64_t last = std::min(call.num_columns, (task + 1) * columns);
    now.linear(call, task * columns, last, scratch(scratch_floats(call)));
  });
}

class LinearPrimitive : public CpuPrimitive {
 public:
  LinearPrimitive(mx::Stream stream, Packing how) : CpuPrimitive(stream), how_(how) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& out = outputs[0];
    float* y = allocate(out);
    if (out.size() == 0) return;
    Linear call = product_of(inputs, 1, how_);
    call.y = y;
    call.num_rows = int64_t(out.size()) / call.num_columns;
    dispatch([rows = Rows(inputs[0]), call] { compute(rows, call); });
  }

  const char* name() const override { return "MlxcelLinear"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return static_cast<const LinearPrimitive&>(other).how_ == how_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = inputs[1].shape(0);
    return {shape};
  }

 private:
  Packing how_;
};

}  // namespace

mx::array linear(const mx::array& x, const mx::array& weight, const std::optional<mx::array>& scales,
                 const std::optional<mx::array>& biases, const std::optional<mx::array>& bias, int group_size,
                 int bits) {
  mx::Stream stream = mx::default_stream(mx::Device::cpu);
  expect(x.ndim() >= 1 && weight.ndim() == 2, "linear takes x [..., inputs] and a weight of two axes");
  std::vector<mx::array> inputs{wide(x, stream)};
  append_weight(inputs, x.shape(-1), weight, scales, biases, bias, group_size, bits, stream);
  mx::Shape shape = x.shape();
  shape.back() = weight.shape(0);
  auto primitive = std::make_shared<LinearPrimitive>(stream, Packing{group_size, bits, bias.has_value()});
  return mx::array(std::move(shape), mx::float32, std::move(primitive), std::move(inputs));
}

}  // namespace mlxcel
