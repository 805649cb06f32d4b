#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "attend.h"
#include "gather.h"
#include "levels.h"
#include "linear.h"
#include "memory.h"
#include "mlx/version.h"
#include "pool.h"
#include "program.h"
#include "rows.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Numbers that some array of Python's holds, and that stay while a call lasts.
using Table = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

mlxcel::Storage storage_of(const std::vector<mlx::core::array>& arrays, const std::vector<int64_t>& bases,
                           const std::vector<Table>& tables, const std::vector<int64_t>& groups,
                           const std::vector<int64_t>& counts) {
  mlxcel::Storage storage{arrays, bases, {}, groups, counts};
  for (const Table& table : tables) storage.tables.push_back({table.data(), int64_t(table.shape(0))});
  return storage;
}

}  // namespace

#define MLXCEL_TEXT(x) #x
#define MLXCEL_VERSION(major, minor, patch) MLXCEL_TEXT(major) "." MLXCEL_TEXT(minor) "." MLXCEL_TEXT(patch)

NB_MODULE(mlxcel_native, m) {
  m.doc() = "CPU kernels of mlxcel as MLX primitives. Import mlx.core first.";
  m.attr("built_for_mlx") = MLXCEL_VERSION(MLX_VERSION_MAJOR, MLX_VERSION_MINOR, MLX_VERSION_PATCH);
  m.attr("passed_self_test") = false;
  m.def("linear", &mlxcel::linear, "x"_a, "weight"_a, "scales"_a = nb::none(), "biases"_a = nb::none(),
        "bias"_a = nb::none(), "group_size"_a = 0, "bits"_a = 0,
        "x·Wᵀ (+ bias) in float32; bits 0: the weight is of a float type, else packed in MLX's affine layout.");
  m.def("embed", &mlxcel::embed, "ids"_a, "weight"_a, "scales"_a = nb::none(), "biases"_a = nb::none(),
        "group_size"_a = 0, "bits"_a = 0, "Rows of a weight, as linear takes it, by their numbers: float32.");
  m.def("gather_linear", &mlxcel::gather_linear, "x"_a, "weight"_a, "indices"_a, "scales"_a = nb::none(),
        "biases"_a = nb::none(), "bias"_a = nb::none(), "group_size"_a = 0, "bits"_a = 0,
        "As linear, each row with the weight of the expert that indices name.");
  m.def("rms_norm", &mlxcel::rms_norm, "x"_a, "weight"_a.none(), "eps"_a);
  m.def("layer_norm", &mlxcel::layer_norm, "x"_a, "weight"_a.none(), "bias"_a.none(), "eps"_a);
  m.def("rope", &mlxcel::rope, "x"_a, "dims"_a, "traditional"_a, "base"_a.none(), "scale"_a, "offset"_a,
        "freqs"_a = nb::none(), "As mx.fast.rope, its offset an array.");
  m.def("argmax", &mlxcel::argmax, "x"_a, "Where the largest value of each row is; at once where the rows are evaluated.");
  m.def("swiglu", &mlxcel::swiglu, "gate"_a, "x"_a, "gate * sigmoid(gate) * x");
  m.def("gelu", &mlxcel::gelu, "gate"_a, "approximation"_a, "x"_a = nb::none(), "GELU, times x where it is given.");
  m.def("clipped_swiglu", &mlxcel::clipped_swiglu, "gate"_a, "x"_a, "slope"_a, "limit"_a,
        "gate * sigmoid(slope * gate) * (x + 1), both cut off at limit.");
  m.def("attend", &mlxcel::attend, "queries"_a, "keys"_a.none(), "values"_a.none(), "storage"_a, "places"_a,
        "scale"_a, "window"_a = 0, "sinks"_a = nb::none(), "softcap"_a = 0,
        "Append and causal attention of spans over their rows' storage; gives the output, then the storage.");
  m.def("attend_in_program", &mlxcel::attend_in_program, "queries"_a, "keys"_a, "values"_a, "appends"_a, "layer"_a,
        "scale"_a, "window"_a, "sinks"_a.none(), "Attention of a layer while a step is recorded.");
  nb::class_<mlxcel::Program>(m, "Program", "A decode step, recorded once and run again as one call.")
      .def(nb::init<const mlx::core::array&, const mlx::core::array&, const mlx::core::array&, int>(), "ids"_a,
           "positions"_a, "result"_a, "num_layers"_a)
      .def("run", [](mlxcel::Program& program, const std::vector<int32_t>& ids, const std::vector<int32_t>& positions,
                     const std::vector<mlx::core::array>& storage, const std::vector<int64_t>& bases,
                     const std::vector<Table>& tables, const std::vector<int64_t>& groups,
                     const std::vector<int64_t>& counts) {
        mlxcel::Storage all = storage_of(storage, bases, tables, groups, counts);
        nb::gil_scoped_release released;
        return program.run(ids, positions, all);
      }, "ids"_a, "positions"_a, "storage"_a, "bases"_a, "tables"_a = nb::make_tuple(), "groups"_a = nb::make_tuple(),
         "counts"_a = nb::make_tuple())
      .def("profile", [](mlxcel::Program& program, const std::vector<int32_t>& ids, const std::vector<int32_t>& positions,
                         const std::vector<mlx::core::array>& storage, const std::vector<int64_t>& bases,
                         const std::vector<Table>& tables, const std::vector<int64_t>& groups,
                         const std::vector<int64_t>& counts) {
        return program.profile(ids, positions, storage_of(storage, bases, tables, groups, counts));
      }, "ids"_a, "positions"_a, "storage"_a, "bases"_a, "tables"_a = nb::make_tuple(), "groups"_a = nb::make_tuple(),
         "counts"_a = nb::make_tuple())
      .def_prop_ro("num_phases", &mlxcel::Program::num_phases)
      .def_prop_ro("foreign", &mlxcel::Program::foreign);
  m.def("unknown", [](const std::vector<int>& shape) {
    return mlx::core::array(mlx::core::Shape(shape.begin(), shape.end()), mlx::core::int32, nullptr, {});
  }, "shape"_a, "An int32 array that nobody has computed, for a recording.");
  m.def("attend_paged", &mlxcel::attend_paged, "queries"_a, "keys"_a.none(), "values"_a.none(), "key_pool"_a,
        "value_pool"_a, "tables"_a, "places"_a, "scale"_a, "window"_a = 0, "sinks"_a = nb::none(), "softcap"_a = 0,
        "As attend, over blocks of 16 positions of a pool, found by each span's table.");
  m.def("lay_together", &mlxcel::lay_together, "arrays"_a, "Copies in one buffer of huge pages.");
  m.def("levels", [] {
    std::vector<std::string> names;
    for (auto* level : mlxcel::levels()) names.push_back(level->name);
    return names;
  }, "What this CPU can run, best first.");
  m.def("level", [] { return std::string(mlxcel::level().name); });
  m.def("use_level", &mlxcel::use_level, "name"_a, "False where this CPU has no such level.");
  m.def("num_threads", &mlxcel::num_threads);
  m.def("set_num_threads", &mlxcel::set_num_threads, "count"_a);
}
