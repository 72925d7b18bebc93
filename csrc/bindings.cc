// Python's view of the core. The only file that includes nanobind; it releases the GIL while kernels run.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/cpu.h"
#include "engine/reduce.h"
#include "optim/lamb.h"

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

// Optimizers hand over addresses: to import some hundred tensors through DLPack at every step would take
// longer than the update of the small ones. shoal.native checks what lies behind them.
using Addresses = std::vector<std::uintptr_t>;
using Counts = std::vector<std::size_t>;

float* floats_at(std::uintptr_t address) { return reinterpret_cast<float*>(address); }

std::pair<double, double> lamb_step(const Addresses& weights, const Addresses& grads,
                                    const Addresses& exp_avgs, const Addresses& exp_avg_sqs,
                                    const Counts& counts, const std::vector<double>& steps,
                                    double learning_rate, double beta1, double beta2, double eps,
                                    double weight_decay, double grad_scale, bool bias_correction,
                                    bool trust_ratio, int num_threads,
                                    const std::optional<std::string>& level_name) {
  std::vector<shoal::LambTensor> tensors;
  for (std::size_t k = 0; k < counts.size(); ++k) {
    tensors.push_back({floats_at(weights.at(k)), floats_at(grads.at(k)), floats_at(exp_avgs.at(k)),
                       floats_at(exp_avg_sqs.at(k)), counts[k], steps.at(k)});
  }
  const shoal::LambOptions options{learning_rate, beta1,      beta2,           eps,
                                   weight_decay,  grad_scale, bias_correction, trust_ratio};
  const shoal::Level level = level_of(level_name);
  nb::gil_scoped_release release;
  const shoal::LambNorms norms = shoal::lamb_step(tensors, options, num_threads, level);
  return {norms.grad_sq, norms.weight_sq};
}

double sum_of_squares(const Addresses& values, const Counts& counts, int num_threads,
                      const std::optional<std::string>& level_name) {
  std::vector<shoal::ConstTensor> tensors;
  for (std::size_t k = 0; k < counts.size(); ++k) tensors.push_back({floats_at(values.at(k)), counts[k]});
  const shoal::Level level = level_of(level_name);
  nb::gil_scoped_release release;
  return shoal::sum_of_squares(tensors, num_threads, level);
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
  m.def("lamb_step", &lamb_step, nb::arg("weights"), nb::arg("grads"), nb::arg("exp_avgs"),
        nb::arg("exp_avg_sqs"), nb::arg("counts"), nb::arg("steps"), nb::kw_only(), nb::arg("learning_rate"),
        nb::arg("beta1"), nb::arg("beta2"), nb::arg("eps"), nb::arg("weight_decay"), nb::arg("grad_scale"),
        nb::arg("bias_correction"), nb::arg("trust_ratio"), nb::arg("num_threads"), nb::arg("level").none());
  m.def("sum_of_squares", &sum_of_squares, nb::arg("values"), nb::arg("counts"), nb::arg("num_threads"),
        nb::arg("level").none());
}
