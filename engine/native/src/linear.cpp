#include "linear.h"

#include "arrays.h"
#include "levels.h"
#include "pool.h"

namespace mlxcel {

namespace {

// A task is a few columns, so that threads of unlike speed end together, yet enough work to be worth the handing over.
constexpr int64_t kTaskFlops = 128 * 1024;

Type type_of(mx::Dtype dtype) {
  if (dtype == mx::float32) return Type::float32;
  if (dtype == mx::float16) return Type::float16;
  if (dtype == mx::bfloat16) return Type::bfloat16;
  throw std::invalid_argument("linear takes float32, float16 and bfloat16");
}

void compute(const Rows& rows, Linear call) {
  int64_t stride = call.num_blocks() * kBlock;
  call.row_stride = stride;
  if (rows.dense && stride == rows.length && call.bits != 4) {
    call.x = rows.data;
  } else {
    thread_local std::vector<float> laid_out;
    if (int64_t(laid_out.size()) < rows.count * stride) laid_out.resize(rows.count * stride);
    float* to = laid_out.data();
    int64_t per_task = std::max<int64_t>(1, 64 * 1024 / stride);
    share((rows.count + per_task - 1) / per_task, [&](int64_t task) {
      int64_t last = std::min(rows.count, (task + 1) * per_task);
      for (int64_t row = task * per_task; row < last; row++)
        rows.lay_out(row, stride, call.bits == 4, to + row * stride);
    });
    call.x = to;
  }
  int64_t columns = kTaskFlops / (stride * std::min<int64_t>(call.num_rows, 8)) / 4 * 4;
  int64_t most = (call.num_columns / (4 * num_threads()) + 3) / 4 * 4;
  columns = std::max<int64_t>(4, call.num_rows > 8 ? kPanelColumns : std::min(columns, most));
  const Level& now = level();
  share((call.num_columns + columns - 1) / columns, [&](int64_t task) {
    int64_t last = std::min(call.num_columns, (task + 1) * columns);
    now.linear(call, task * columns, last, scratch(scratch_floats(call)));
  });
}

class LinearPrimitive : public CpuPrimitive {
 public:
  LinearPrimitive(mx::Stream stream, int group_size, int bits, bool has_bias)
      : CpuPrimitive(stream), group_size_(group_size), bits_(bits), has_bias_(has_bias) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& out = outputs[0];
    float* y = allocate(out);
    if (out.size() == 0) return;
    const mx::array &x = inputs[0], &weight = inputs[1];
    Linear call{};
    call.y = y;
    call.num_inputs = x.shape(-1);
    call.num_columns = weight.shape(0);
    call.num_rows = int64_t(out.size()) / call.num_columns;
    call.weight = weight.data<char>();
    call.bits = bits_;
    if (bits_) {
      call.scales = inputs[2].data<char>();
      call.biases = inputs[3].data<char>();
      call.scale_type = type_of(inputs[2].dtype());
      call.group_size = group_size_;
    } else {
      call.weight_type = type_of(weight.dtype());
    }
    if (has_bias_) call.bias = inputs.back().data<float>();
    dispatch([rows = Rows(x), call] { compute(rows, call); });
  }

  const char* name() const override { return "MlxcelLinear"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    auto& same = static_cast<const LinearPrimitive&>(other);
    return same.group_size_ == group_size_ && same.bits_ == bits_ && same.has_bias_ == has_bias_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = inputs[1].shape(0);
    return {shape};
  }

 private:
  int group_size_, bits_;
  bool has_bias_;
};

}  // namespace

mx::array linear(const mx::array& x, const mx::array& weight, const std::optional<mx::array>& scales,
                 const std::optional<mx::array>& biases, const std::optional<mx::array>& bias, int group_size,
                 int bits) {
  mx::Stream stream = mx::default_stream(mx::Device::cpu);
  expect(x.ndim() >= 1 && weight.ndim() == 2, "linear takes x [..., inputs] and a weight of two axes");
  int num_inputs = x.shape(-1), num_columns = weight.shape(0);
  std::vector<mx::array> inputs{wide(x, stream), dense(weight, stream)};
  if (bits) {
    expect(bits == 2 || bits == 3 || bits == 4 || bits == 5 || bits == 6 || bits == 8, "bits are 2, 3, 4, 5, 6 or 8");
    expect(group_size == 32 || group_size == 64 || group_size == 128, "groups are of 32, 64 or 128");
    expect(scales && biases && scales->dtype() == biases->dtype() && scales->shape() == biases->shape(),
           "packed weights have scales and biases of one type and shape");
    type_of(scales->dtype());
    expect(weight.dtype() == mx::uint32 && num_inputs % group_size == 0 &&
               int64_t(weight.shape(1)) * 32 == int64_t(num_inputs) * bits &&
               scales->shape() == mx::Shape({num_columns, num_inputs / group_size}),
           "x, packed weight, scales and biases do not fit each other");
    inputs.push_back(dense(*scales, stream));
    inputs.push_back(dense(*biases, stream));
  } else {
    type_of(weight.dtype());
    expect(weight.shape(1) == num_inputs && num_inputs > 0, "x and weight do not fit each other");
  }
  if (bias) {
    expect(bias->shape() == mx::Shape({num_columns}), "the bias has one value for each output");
    inputs.push_back(dense(wide(*bias, stream), stream));
  }
  mx::Shape shape = x.shape();
  shape.back() = num_columns;
  auto primitive = std::make_shared<LinearPrimitive>(stream, group_size, bits, bias.has_value());
  return mx::array(std::move(shape), mx::float32, std::move(primitive), std::move(inputs));
}

}  // namespace mlxcel
