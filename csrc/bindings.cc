// Python's view of the core. The only file that includes nanobind; it releases the GIL while kernels run.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/cpu.h"
#include "engine/combine.h"
#include "engine/engine.h"
#include "engine/helper.h"
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

// ---- the two-hop engine ---------------------------------------------------------------------------------

shoal::Bytes secret_of(const nb::bytes& secret) {
  const auto* data = reinterpret_cast<const std::uint8_t*>(secret.c_str());
  return {data, data + secret.size()};
}

using PeerTuple = std::tuple<std::string, std::string, int, int, int>;
using HelperTuple = std::tuple<std::string, int, std::string>;

void connect(shoal::Engine& engine, const std::vector<PeerTuple>& peers, const std::vector<HelperTuple>& helpers,
             const std::vector<int>& pattern, const std::string& segment, double timeout_s) {
  std::vector<shoal::PeerInfo> peer_infos;
  for (const auto& [host, address, port, global_rank, pid] : peers) {
    peer_infos.push_back({host, address, port, global_rank, pid});
  }
  std::vector<shoal::HelperInfo> helper_infos;
  for (const auto& [address, port, name] : helpers) helper_infos.push_back({address, port, name});
  nb::gil_scoped_release release;
  engine.connect(std::move(peer_infos), std::move(helper_infos), pattern, segment, timeout_s);
}

std::uint64_t submit(shoal::Engine& engine, const std::string& kind, std::uintptr_t input, std::uintptr_t output,
                     std::uint64_t count, const std::string& dtype, const std::string& op, int root,
                     const std::vector<std::int64_t>& shape, double timeout_s) {
  shoal::OpSpec spec;
  spec.kind = shoal::kind_named(kind);
  spec.element = shoal::element_named(dtype);
  spec.count = count;
  spec.root = root;
  spec.input = reinterpret_cast<const std::byte*>(input);
  spec.output = reinterpret_cast<std::byte*>(output);
  spec.timeout_s = timeout_s;
  spec.shape = shape;
  if (spec.kind == shoal::Kind::delegated) spec.name = op;
  else spec.combine = shoal::combine_named(op);
  nb::gil_scoped_release release;
  return engine.submit(std::move(spec));
}

std::vector<std::tuple<std::string, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>> take_trace(
    shoal::Engine& engine) {
  std::vector<std::tuple<std::string, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>> events;
  for (const shoal::TraceEvent& each : engine.take_trace()) {
    events.emplace_back(each.what, each.begin_ns, each.end_ns, each.seq, each.chunk);
  }
  return events;
}

void bind_engine(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::exception<shoal::GroupError>(m, "GroupError", PyExc_RuntimeError);
  nb::class_<shoal::EngineOptions>(m, "EngineOptions")
      .def(nb::init<>())
      .def_rw("rank", &shoal::EngineOptions::rank)
      .def_rw("size", &shoal::EngineOptions::size)
      .def_rw("group", &shoal::EngineOptions::group)
      .def_rw("address", &shoal::EngineOptions::address)
      .def_rw("port", &shoal::EngineOptions::port)
      .def_rw("chunk_bytes", &shoal::EngineOptions::chunk_bytes)
      .def_rw("shared_chunk_bytes", &shoal::EngineOptions::shared_chunk_bytes)
      .def_rw("num_slots", &shoal::EngineOptions::num_slots)
      .def_rw("least_window_bytes", &shoal::EngineOptions::least_window_bytes)
      .def_rw("answer_s", &shoal::EngineOptions::answer_s)
      .def_rw("window_bytes", &shoal::EngineOptions::window_bytes)
      .def_rw("eager_bytes", &shoal::EngineOptions::eager_bytes)
      .def_rw("connections_per_peer", &shoal::EngineOptions::connections_per_peer)
      .def_rw("send_buffer_bytes", &shoal::EngineOptions::send_buffer_bytes)
      .def_rw("peer_grace_s", &shoal::EngineOptions::peer_grace_s)
      .def_rw("straggler_s", &shoal::EngineOptions::straggler_s)
      .def_rw("wide_partials", &shoal::EngineOptions::wide_partials)
      .def_rw("serve_beside_workers", &shoal::EngineOptions::serve_beside_workers)
      .def("set_secret", [](shoal::EngineOptions& options, const nb::bytes& secret) { options.secret = secret_of(secret); });
  nb::class_<shoal::Engine>(m, "Engine")
      .def(nb::init<shoal::EngineOptions>())
      .def_prop_ro("port", &shoal::Engine::port)
      .def("connect", &connect)
      .def("set_pattern", &shoal::Engine::set_pattern, Release())
      .def("submit", &submit)
      .def("finish_delegated", &shoal::Engine::finish_delegated, Release())
      .def("wait", &shoal::Engine::wait, Release())
      .def("is_done", &shoal::Engine::is_done, Release())
      .def("watch", &shoal::Engine::watch, Release())
      .def("next_watched", &shoal::Engine::next_watched, Release())
      .def("error", &shoal::Engine::error, Release())
      .def("abort", &shoal::Engine::abort, Release())
      .def("close", &shoal::Engine::close, Release())
      .def("counters", &shoal::Engine::counters, Release())
      .def("take_events", &shoal::Engine::take_events, Release())
      .def("trace", &shoal::Engine::trace)
      .def("take_trace", &take_trace);
  nb::class_<shoal::HelperServer>(m, "HelperServer")
      .def("__init__",
           [](shoal::HelperServer* self, const std::string& address, int port, const nb::bytes& secret,
              int send_buffer_bytes) {
             new (self) shoal::HelperServer(address, port, secret_of(secret), send_buffer_bytes);
           })
      .def_prop_ro("port", &shoal::HelperServer::port)
      .def("start", &shoal::HelperServer::start, Release())
      .def("stop", &shoal::HelperServer::stop, Release())
      .def("counters", &shoal::HelperServer::counters, Release());
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "shoal's C++ core; use it through shoal.native";
  nb::set_leak_warnings(false);  // a process that ends without destroy_process_group() leaves its engine
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
  bind_engine(m);
}
