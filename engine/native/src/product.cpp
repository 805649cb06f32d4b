#include "product.h"

#include <memory>

namespace mlxcel {

namespace {

// A task is a few columns, so that threads of unlike speed end together, yet enough work to be worth the handing over.
constexpr int64_t kTaskFlops = 128 * 1024;

}  // namespace

Type type_of(mx::Dtype dtype) {
  if (dtype == mx::float32) return Type::float32;
  if (dtype == mx::float16) return Type::float16;
  if (dtype == mx::bfloat16) return Type::bfloat16;
  throw std::invalid_argument("weights are of float32, float16 and bfloat16");
}

void append_weight(std::vector<mx::array>& to, int num_inputs, const mx::array& weight,
                   const std::optional<mx::array>& scales, const std::optional<mx::array>& biases,
                   const std::optional<mx::array>& bias, int group_size, int bits, mx::Stream stream) {
  to.push_back(dense(weight, stream));
  if (bits) {
    expect(bits == 2 || bits == 3 || bits == 4 || bits == 5 || bits == 6 || bits == 8, "bits are 2, 3, 4, 5, 6 or 8");
    expect(group_size == 32 || group_size == 64 || group_size == 128, "groups are of 32, 64 or 128");
    expect(scales && biases && scales->dtype() == biases->dtype() && scales->shape() == biases->shape(),
           "packed weights have scales and biases of one type and shape");
    type_of(scales->dtype());
    mx::Shape groups = weight.shape();
    groups.back() = num_inputs / group_size;
    expect(weight.dtype() == mx::uint32 && num_inputs > 0 && num_inputs % group_size == 0 &&
               int64_t(weight.shape(-1)) * 32 == int64_t(num_inputs) * bits && scales->shape() == groups,
           "x, packed weight, scales and biases do not fit each other");
    to.push_back(dense(*scales, stream));
    to.push_back(dense(*biases, stream));
  } else {
    type_of(weight.dtype());
    expect(weight.shape(-1) == num_inputs && num_inputs > 0, "x and weight do not fit each other");
  }
  if (bias) {
    mx::Shape outputs(weight.shape().begin(), weight.shape().end() - 1);
    expect(bias->shape() == outputs, "the bias has one value for each output");
    to.push_back(dense(wide(*bias, stream), stream));
  }
}

Linear product_of(const std::vector<mx::array>& inputs, size_t at, const Packing& how) {
  const mx::array& weight = inputs[at];
  Linear call{};
  call.num_inputs = inputs[0].shape(-1);
  call.num_columns = weight.shape(-2);
  call.row_stride = call.num_blocks() * kBlock;
  call.weight = weight.data<char>();
  call.bits = how.bits;
  if (how.bits) {
    call.scales = inputs[at + 1].data<char>();
    call.biases = inputs[at + 2].data<char>();
    call.scale_type = type_of(inputs[at + 1].dtype());
    call.group_size = how.group_size;
  } else {
    call.weight_type = type_of(weight.dtype());
  }
  if (how.has_bias) call.bias = inputs[at + (how.bits ? 3 : 1)].data<float>();
  return call;
}

int64_t columns_per_task(const Linear& call, int64_t num_weights) {
  if (call.num_rows > 8) return kPanelColumns;
  int64_t columns = kTaskFlops / (call.row_stride * call.num_rows) / 4 * 4;
  int64_t most = (call.num_columns * num_weights / (4 * num_threads()) + 3) / 4 * 4;
  return std::max<int64_t>(4, std::min(columns, most));
}

}  // namespace mlxcel
