// Python's view of the core. The only file that includes nanobind; it releases the GIL while kernels run.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "engine/reduce.h"

namespace nb = nanobind;

namespace {

using InBuffer = nb::ndarray<nb::ro>;
using OutBuffer = nb::ndarray<>;

shoal::Level level_of(const std::optional<std::string>& name) {
  if (!name) return shoal::best_level();
  const std::optional<shoal::Level> level = shoal::level_named(*name);
  if (!level) throw std::invalid_argument("level '" + *name + "' must be portable, avx2 or avx512");
  return *level;
}

std::optional<shoal::DType> dtype_named(const std::string& name) {
  if (name == "float32") return shoal::DType::float32;
  if (name == "bfloat16") return shoal::DType::bfloat16;
  if (name == "float16") return shoal::DType::float16;
  return std::nullopt;
}

std::optional<shoal::DType> dtype_of(nb::dlpack::dtype dtype) {
  const auto code = static_cast<nb::dlpack::dtype_code>(dtype.code);
  if (dtype.lanes != 1) return std::nullopt;
  if (code == nb::dlpack::dtype_code::Float && dtype.bits == 32) return shoal::DType::float32;
  if (code == nb::dlpack::dtype_code::Float && dtype.bits == 16) return shoal::DType::float16;
  if (code == nb::dlpack::dtype_code::Bfloat && dtype.bits == 16) return shoal::DType::bfloat16;
  return std::nullopt;
}

// A buffer's place, its bytes and its element type, if that is one that we sum.
struct Span {
  const void* data;
  std::size_t num_bytes;
  std::optional<shoal::DType> dtype;
};

template <class Buffer>
Span span_of(const Buffer& buffer, const std::string& who) {
  if (buffer.device_type() != nb::device::cpu::value) {
    throw std::invalid_argument(who + " must be in the memory of the host");
  }
  std::int64_t dense = 1;
  for (std::size_t dim = buffer.ndim(); dim-- > 0;) {
    if (buffer.shape(dim) > 1 && buffer.stride(dim) != dense) {
      throw std::invalid_argument(who + " must be contiguous");
    }
    dense *= static_cast<std::int64_t>(buffer.shape(dim));
  }
  return {buffer.data(), buffer.nbytes(), dtype_of(buffer.dtype())};
}

void sum_in_rank_order(const OutBuffer& out, const std::vector<InBuffer>& inputs,
                       const std::optional<std::string>& dtype_name, int num_threads,
                       const std::optional<std::string>& level_name) {
  const Span to = span_of(out, "the output");
  const std::optional<shoal::DType> dtype = dtype_name ? dtype_named(*dtype_name) : to.dtype;
  if (!dtype) throw std::invalid_argument("the element type must be float32, bfloat16 or float16");
  if (to.num_bytes % shoal::size_of(*dtype) != 0) {
    throw std::invalid_argument("the output's " + std::to_string(to.num_bytes) +
                                " bytes are not a whole number of elements");
  }
  std::vector<const void*> from;
  for (std::size_t k = 0; k < inputs.size(); ++k) {
    const std::string who = "input " + std::to_string(k);
    const Span span = span_of(inputs[k], who);
    if (!dtype_name && span.dtype != dtype) {
      throw std::invalid_argument(who + " has another element type than the output");
    }
    if (span.num_bytes != to.num_bytes) {
      throw std::invalid_argument(who + " has " + std::to_string(span.num_bytes) +
                                  " bytes, the output has " + std::to_string(to.num_bytes));
    }
    from.push_back(span.data);
  }
  const shoal::Level level = level_of(level_name);
  nb::gil_scoped_release release;
  shoal::sum_in_rank_order(const_cast<void*>(to.data), from.data(), from.size(),
                           to.num_bytes / shoal::size_of(*dtype), *dtype, num_threads, level);
}

nb::dict cpu_features() {
  nb::dict features;
  for (const auto& [name, present] : shoal::cpu_features()) {
    features[nb::str(name.data(), name.size())] = present;
  }
  return features;
}

std::vector<std::string> simd_levels() {
  std::vector<std::string> names;
  for (shoal::Level level : shoal::supported_levels()) names.emplace_back(shoal::name_of(level));
  return names;
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "shoal's C++ core; use it through shoal.native";
  m.def("cpu_features", &cpu_features);
  m.def("simd_levels", &simd_levels);
  // noconvert: a converted copy of the output would take the sum and be thrown away
  m.def("sum_in_rank_order", &sum_in_rank_order, nb::arg("out").noconvert(), nb::arg("inputs").noconvert(),
        nb::arg("dtype").none(), nb::arg("num_threads"), nb::arg("level").none());
}
