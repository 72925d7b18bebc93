// Python bindings of the core. The only file that includes nanobind. Releases the GIL while kernels run.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/crc32c.h"
#include "c_api/group.h"
#include "c_api/single_rank.h"
#include "detection/match.h"
#include "detection/paste.h"
#include "detection/suppress.h"
#include "device/lane.h"
#include "engine/engine.h"
#include "engine/helper.h"
#include "engine/reduce.h"
#include "gil.h"
#include "image/finish.h"
#include "optim/adafactor.h"
#include "optim/elementwise.h"
#include "optim/lamb.h"
#include "optim/momentum.h"
#include "optim/unit_sums.h"

namespace nb = nanobind;

namespace {

using shoal::WithGil;
using shoal::WithoutGil;
using InBuffer = nb::ndarray<nb::ro>;
using OutBuffer = nb::ndarray<>;

shoal::Level level_of(const std::optional<std::string>& name) {
  if (!name) return shoal::best_level();
  const std::optional<shoal::Level> level = shoal::level_named(*name);
  if (!level) throw std::invalid_argument("level '" + *name + "' must be portable, avx2 or avx512");
  return *level;
}

std::optional<shoal::Element> dtype_named(const std::string& name) {
  if (name == "float32") return shoal::Element::float32;
  if (name == "bfloat16") return shoal::Element::bfloat16;
  if (name == "float16") return shoal::Element::float16;
  return std::nullopt;
}

std::optional<shoal::Element> dtype_of(nb::dlpack::dtype dtype) {
  const auto code = static_cast<nb::dlpack::dtype_code>(dtype.code);
  if (dtype.lanes != 1) return std::nullopt;
  if (code == nb::dlpack::dtype_code::Float && dtype.bits == 32) return shoal::Element::float32;
  if (code == nb::dlpack::dtype_code::Float && dtype.bits == 16) return shoal::Element::float16;
  if (code == nb::dlpack::dtype_code::Bfloat && dtype.bits == 16) return shoal::Element::bfloat16;
  return std::nullopt;
}

// Address and size of a buffer, and its element type if the kernels support it.
struct Span {
  const void* data;
  std::size_t num_bytes;
  std::optional<shoal::Element> dtype;
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
  const std::optional<shoal::Element> dtype = dtype_name ? dtype_named(*dtype_name) : to.dtype;
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
  const WithoutGil released;
  shoal::sum_in_rank_order(const_cast<void*>(to.data), from.data(), from.size(),
                           to.num_bytes / shoal::size_of(*dtype), *dtype, num_threads, level);
}

// Optimizers pass addresses: importing hundreds of tensors through DLPack at every step would take longer than the
// update of the small ones. shoal.native validates the tensors.
using Addresses = std::vector<std::uintptr_t>;
using Counts = std::vector<std::size_t>;

float* floats_at(std::uintptr_t address) { return reinterpret_cast<float*>(address); }

std::vector<shoal::MomentsTensor> moments_tensors(const Addresses& weights, const Addresses& grads,
                                                  const Addresses& exp_avgs, const Addresses& exp_avg_sqs,
                                                  const Counts& counts, const std::vector<double>& steps) {
  std::vector<shoal::MomentsTensor> tensors;
  for (std::size_t k = 0; k < counts.size(); ++k) {
    tensors.push_back({floats_at(weights.at(k)), floats_at(grads.at(k)), floats_at(exp_avgs.at(k)),
                       floats_at(exp_avg_sqs.at(k)), counts[k], steps.at(k)});
  }
  return tensors;
}

// Defines a step of an optimizer with two moments and no other options.
template <auto Step>
void bind_moments_step(nb::module_& m, const char* name) {
  m.def(
      name,
      [](const Addresses& weights, const Addresses& grads, const Addresses& exp_avgs, const Addresses& exp_avg_sqs,
         const Counts& counts, const std::vector<double>& steps, double learning_rate, double beta1, double beta2, double eps,
         double weight_decay, double grad_scale, int num_threads, const std::optional<std::string>& level_name) {
        const auto tensors = moments_tensors(weights, grads, exp_avgs, exp_avg_sqs, counts, steps);
        const shoal::MomentsOptions options{learning_rate, beta1, beta2, eps, weight_decay, grad_scale};
        const shoal::Level level = level_of(level_name);
        const WithoutGil released;
        const shoal::Norms norms = Step(tensors, options, num_threads, level);
        return std::pair(norms.grad_sq, norms.weight_sq);
      },
      nb::arg("weights"), nb::arg("grads"), nb::arg("exp_avgs"), nb::arg("exp_avg_sqs"), nb::arg("counts"),
      nb::arg("steps"), nb::kw_only(), nb::arg("learning_rate"), nb::arg("beta1"), nb::arg("beta2"), nb::arg("eps"),
      nb::arg("weight_decay"), nb::arg("grad_scale"), nb::arg("num_threads"), nb::arg("level").none());
}

std::pair<double, double> lamb_step(const Addresses& weights, const Addresses& grads,
                                    const Addresses& exp_avgs, const Addresses& exp_avg_sqs,
                                    const Counts& counts, const std::vector<double>& steps,
                                    double learning_rate, double beta1, double beta2, double eps,
                                    double weight_decay, double grad_scale, bool bias_correction,
                                    bool trust_ratio, int num_threads,
                                    const std::optional<std::string>& level_name) {
  const auto tensors = moments_tensors(weights, grads, exp_avgs, exp_avg_sqs, counts, steps);
  const shoal::LambOptions options{learning_rate, beta1,      beta2,           eps,
                                   weight_decay,  grad_scale, bias_correction, trust_ratio};
  const shoal::Level level = level_of(level_name);
  const WithoutGil released;
  const shoal::Norms norms = shoal::lamb_step(tensors, options, num_threads, level);
  return {norms.grad_sq, norms.weight_sq};
}

std::vector<shoal::MomentumTensor> momentum_tensors(const Addresses& weights, const Addresses& grads,
                                                    const Addresses& momenta, const Counts& counts) {
  std::vector<shoal::MomentumTensor> tensors;
  for (std::size_t k = 0; k < counts.size(); ++k) {
    tensors.push_back(
        {floats_at(weights.at(k)), floats_at(grads.at(k)), floats_at(momenta.at(k)), counts[k]});
  }
  return tensors;
}

std::pair<double, double> sgd_step(const Addresses& weights, const Addresses& grads, const Addresses& momenta,
                                   const Counts& counts, double learning_rate, double momentum,
                                   double weight_decay, double grad_scale, bool nesterov, int num_threads,
                                   const std::optional<std::string>& level_name) {
  const auto tensors = momentum_tensors(weights, grads, momenta, counts);
  const shoal::SgdOptions options{learning_rate, momentum, weight_decay, grad_scale, nesterov};
  const shoal::Level level = level_of(level_name);
  const WithoutGil released;
  const shoal::Norms norms = shoal::sgd_step(tensors, options, num_threads, level);
  return {norms.grad_sq, norms.weight_sq};
}

std::pair<double, double> lars_step(const Addresses& weights, const Addresses& grads,
                                    const Addresses& momenta, const Counts& counts, double learning_rate,
                                    double momentum, double weight_decay, double eta, double eps,
                                    double grad_scale, bool clips, bool nesterov, bool trust_ratio,
                                    int num_threads, const std::optional<std::string>& level_name) {
  const auto tensors = momentum_tensors(weights, grads, momenta, counts);
  const shoal::LarsOptions options{learning_rate, momentum, weight_decay, eta,        eps,
                                   grad_scale,    clips,    nesterov,     trust_ratio};
  const shoal::Level level = level_of(level_name);
  const WithoutGil released;
  const shoal::Norms norms = shoal::lars_step(tensors, options, num_threads, level);
  return {norms.grad_sq, norms.weight_sq};
}

std::pair<double, double> novograd_step(const Addresses& weights, const Addresses& grads,
                                        const Addresses& momenta, const Addresses& norm_sqs,
                                        const Counts& counts, const std::vector<double>& steps,
                                        double learning_rate, double beta1, double beta2, double eps,
                                        double weight_decay, double grad_scale, bool bias_correction,
                                        bool grad_averaging, bool init_zero, bool reg_inside_moment,
                                        int num_threads, const std::optional<std::string>& level_name) {
  const auto tensors = momentum_tensors(weights, grads, momenta, counts);
  std::vector<shoal::NovoGradState> states;
  for (std::size_t k = 0; k < counts.size(); ++k) {
    states.push_back({floats_at(norm_sqs.at(k)), steps.at(k)});
  }
  const shoal::NovoGradOptions options{learning_rate,   beta1,          beta2,     eps,
                                       weight_decay,    grad_scale,     bias_correction,
                                       grad_averaging,  init_zero,      reg_inside_moment};
  const shoal::Level level = level_of(level_name);
  const WithoutGil released;
  const shoal::Norms norms = shoal::novograd_step(tensors, states, options, num_threads, level);
  return {norms.grad_sq, norms.weight_sq};
}

std::pair<double, double> adafactor_step(const Addresses& weights, const Addresses& grads, const Addresses& row_vars,
                                         const Addresses& col_vars, const Counts& counts, const Counts& columns,
                                         const std::vector<double>& shares, double learning_rate, double eps1,
                                         double weight_decay, double grad_scale, int num_threads,
                                         const std::optional<std::string>& level_name) {
  std::vector<shoal::AdafactorTensor> tensors;
  for (std::size_t k = 0; k < counts.size(); ++k) {
    tensors.push_back({floats_at(weights.at(k)), floats_at(grads.at(k)), floats_at(row_vars.at(k)), floats_at(col_vars.at(k)),
                       counts[k], columns.at(k), shares.at(k)});
  }
  const shoal::AdafactorOptions options{learning_rate, eps1, weight_decay, grad_scale};
  const shoal::Level level = level_of(level_name);
  const WithoutGil released;
  const shoal::Norms norms = shoal::adafactor_step(tensors, options, num_threads, level);
  return {norms.grad_sq, norms.weight_sq};
}

// ---- norms of tensors that servers keep -----------------------------------------------------------------

using Sums = std::tuple<double, double, double>;

// Returns the sums of each tensor from those of its units, which lie at `units` (optim/unit_sums.h) one tensor after the
// other, and the norm of all gradients. `counts` are the tensors' numbers of elements.
std::pair<std::vector<Sums>, double> unit_totals(std::uintptr_t units, const Counts& counts) {
  const auto* at = reinterpret_cast<const shoal::UnitSums*>(units);
  std::vector<Sums> totals;
  double grad_sq = 0.0;
  for (const std::size_t count : counts) {
    const shoal::UnitSums total = shoal::total_of({at, shoal::num_units(count)}, grad_sq);
    totals.emplace_back(total.grad_sq, total.weight_sq, total.other_sq);
    at += shoal::num_units(count);
  }
  return {std::move(totals), std::sqrt(grad_sq)};
}

using Coefficients = std::vector<float>;

Coefficients of_motion(const shoal::Motion& m) {
  return {m.keep, m.of_grad, m.of_weight, m.by_momentum, m.by_change, m.by_weight};
}

Coefficients lamb_coefficients(const Sums& total, double learning_rate, bool trust_ratio) {
  shoal::LambOptions options{};
  options.learning_rate = learning_rate;
  options.trust_ratio = trust_ratio;
  return {shoal::lamb_step_size(options, std::get<1>(total), std::get<2>(total))};
}

// Returns the factor that normalises a tensor's gradient.
double lans_grad_scale(const Sums& total, double grad_scale, double eps) {
  shoal::MomentsOptions options{};
  options.grad_scale = grad_scale;
  options.eps = eps;
  return shoal::lans_grad_scale(options, std::get<0>(total));
}

Coefficients lans_coefficients(const Sums& total, double learning_rate, double beta1) {
  shoal::MomentsOptions options{};
  options.learning_rate = learning_rate;
  options.beta1 = beta1;
  const auto steps = shoal::lans_step_sizes(options, {std::get<0>(total), std::get<1>(total), std::get<2>(total)});
  return {steps.begin(), steps.end()};
}

Coefficients lars_coefficients(const Sums& total, double learning_rate, double momentum, double weight_decay, double eta,
                               double eps, bool clips, bool nesterov, bool trust_ratio) {
  const shoal::LarsOptions options{learning_rate, momentum, weight_decay, eta,        eps,
                                   1.0,           clips,    nesterov,     trust_ratio};
  return of_motion(shoal::lars_motion(options, {std::get<0>(total), std::get<1>(total), std::get<2>(total)}));
}

Coefficients adafactor_coefficients(const Sums& total, std::size_t count, double learning_rate, double weight_decay) {
  const shoal::UnitSums sums{std::get<0>(total), std::get<1>(total), std::get<2>(total)};
  const shoal::AdafactorMove move = shoal::adafactor_move_of(learning_rate, weight_decay, sums, count);
  return {move.keep, move.size};
}

// Also returns the running squared norm of the gradient.
std::pair<Coefficients, float> novograd_coefficients(const Sums& total, float norm_sq, double step, double learning_rate,
                                                     double beta1, double beta2, double eps, double weight_decay,
                                                     bool bias_correction, bool grad_averaging, bool init_zero,
                                                     bool reg_inside_moment) {
  const shoal::NovoGradOptions options{learning_rate, beta1,     beta2,           eps,
                                       weight_decay,  1.0,       bias_correction, grad_averaging,
                                       init_zero,     reg_inside_moment};
  Coefficients motion = of_motion(shoal::novograd_motion(options, {&norm_sq, step}, std::get<0>(total)));
  return {std::move(motion), norm_sq};
}

double sum_of_squares(const Addresses& values, const Counts& counts, int num_threads,
                      const std::optional<std::string>& level_name) {
  std::vector<shoal::ConstTensor> tensors;
  for (std::size_t k = 0; k < counts.size(); ++k) tensors.push_back({floats_at(values.at(k)), counts[k]});
  const shoal::Level level = level_of(level_name);
  const WithoutGil released;
  return shoal::sum_of_squares(tensors, num_threads, level);
}

// Type and strides of an output image: [3, H, W], in either layout.
shoal::Finished finished_of(const OutBuffer& out) {
  const auto code = static_cast<nb::dlpack::dtype_code>(out.dtype().code);
  const int bits = out.dtype().lanes == 1 ? out.dtype().bits : 0;
  shoal::Finished finished{out.data(), shoal::FinishedType::float32, out.stride(0), out.stride(1), out.stride(2)};
  if (code == nb::dlpack::dtype_code::UInt && bits == 8) finished.type = shoal::FinishedType::uint8;
  else if (bits == 16 && code == nb::dlpack::dtype_code::UInt) finished.type = shoal::FinishedType::bfloat16;
  else if (bits == 16 && code == nb::dlpack::dtype_code::Bfloat) finished.type = shoal::FinishedType::bfloat16;
  else if (bits != 32 || code != nb::dlpack::dtype_code::Float) {
    throw std::invalid_argument("the output must be float32, bfloat16 (or its bits as uint16) or uint8");
  }
  if (finished.column != 1 && !(finished.column == 3 && finished.channel == 1)) {
    throw std::invalid_argument("the output must have the pixels of a row next to each other, in planes or "
                                "channels last");
  }
  return finished;
}

void finish_image(const InBuffer& pixels, const OutBuffer& out, const std::vector<std::pair<int, float>>& steps,
                  const std::vector<float>& scale, const std::vector<float>& shift, bool flip,
                  const std::optional<std::string>& level_name) {
  if (pixels.ndim() != 3 || pixels.shape(2) != 3 || pixels.dtype() != nb::dtype<std::uint8_t>() ||
      pixels.stride(1) != 3 || pixels.stride(2) != 1) {
    throw std::invalid_argument("the pixels must be uint8 [H, W, 3], with those of a row next to each other");
  }
  if (out.ndim() != 3 || out.shape(0) != 3 || out.shape(1) != pixels.shape(0) || out.shape(2) != pixels.shape(1)) {
    throw std::invalid_argument("the output must be [3, H, W] with the height and the width of the pixels");
  }
  if (pixels.device_type() != nb::device::cpu::value || out.device_type() != nb::device::cpu::value) {
    throw std::invalid_argument("pixels and output must be in the memory of the host");
  }
  const shoal::PixelRows rows{static_cast<const std::uint8_t*>(pixels.data()), pixels.shape(0), pixels.shape(1),
                              pixels.stride(0)};
  shoal::FinishOptions options{flip, {}, {}};
  for (std::size_t c = 0; c < 3; ++c) {
    options.scale[c] = scale.at(c);
    options.shift[c] = shift.at(c);
  }
  std::vector<shoal::ColourStep> colour_steps;
  for (const auto& [kind, factor] : steps) colour_steps.push_back({static_cast<shoal::Adjustment>(kind), factor});
  const shoal::Finished finished = finished_of(out);
  const shoal::Level level = level_of(level_name);
  const WithoutGil released;
  shoal::finish_image(rows, finished, colour_steps, options, level);
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

// ---- detection ------------------------------------------------------------------------------------------

template <class T, std::size_t kDims>
using CpuArray = nb::ndarray<T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;

void match_boxes(const CpuArray<const float, 3>& objects, const CpuArray<const std::int64_t, 1>& counts,
                 const CpuArray<const float, 3>& anchors, const CpuArray<std::int64_t, 2>& matches, double high,
                 double low, bool allow_low_quality, int num_threads, const std::optional<std::string>& level) {
  const shoal::MatchInput input{objects.data(),   counts.data(),    anchors.data(),  anchors.shape(0) == 1,
                                objects.shape(0), objects.shape(1), matches.shape(1)};
  const shoal::MatchOptions options{static_cast<float>(high), static_cast<float>(low), allow_low_quality};
  const shoal::Level chosen = level_of(level);
  const WithoutGil released;
  shoal::match_boxes(input, options, matches.data(), num_threads, chosen);
}

void suppress_boxes(const CpuArray<const float, 3>& boxes, const CpuArray<const float, 2>& scores,
                    const std::optional<CpuArray<const std::int64_t, 2>>& classes,
                    const CpuArray<std::uint8_t, 2>& keep, double iou_threshold, int num_threads,
                    const std::optional<std::string>& level) {
  const shoal::SuppressInput input{boxes.data(), scores.data(), classes ? classes->data() : nullptr,
                                   boxes.shape(0), boxes.shape(1)};
  const shoal::Level chosen = level_of(level);
  const WithoutGil released;
  shoal::suppress_boxes(input, iou_threshold, keep.data(), num_threads, chosen);
}

void paste_masks(const CpuArray<const float, 3>& masks, const CpuArray<const float, 2>& boxes,
                 const CpuArray<const std::int64_t, 2>& images, const CpuArray<std::uint8_t, 1>& bitmaps,
                 double threshold, int num_threads, const std::optional<std::string>& level) {
  const shoal::PasteInput input{masks.data(), boxes.data(), images.data(), masks.shape(0), masks.shape(1)};
  const shoal::Level chosen = level_of(level);
  const WithoutGil released;
  shoal::paste_masks(input, static_cast<float>(threshold), bitmaps.data(), num_threads, chosen);
}

void bind_detection(nb::module_& m) {
  m.def("match_boxes", &match_boxes, nb::arg("objects").noconvert(), nb::arg("counts").noconvert(),
        nb::arg("anchors").noconvert(), nb::arg("matches").noconvert(), nb::arg("high"), nb::arg("low"),
        nb::arg("allow_low_quality"), nb::arg("num_threads"), nb::arg("level").none() = nb::none());
  m.def("suppress_boxes", &suppress_boxes, nb::arg("boxes").noconvert(), nb::arg("scores").noconvert(),
        nb::arg("classes").noconvert().none(), nb::arg("keep").noconvert(), nb::arg("iou_threshold"),
        nb::arg("num_threads"), nb::arg("level").none() = nb::none());
  m.def("paste_masks", &paste_masks, nb::arg("masks").noconvert(), nb::arg("boxes").noconvert(),
        nb::arg("images").noconvert(), nb::arg("bitmaps").noconvert(), nb::arg("threshold"),
        nb::arg("num_threads"), nb::arg("level").none() = nb::none());
}

// ---- the two-hop engine ---------------------------------------------------------------------------------

shoal::Bytes secret_of(const nb::bytes& secret) {
  const auto* data = reinterpret_cast<const std::uint8_t*>(secret.c_str());
  return {data, data + secret.size()};
}

// Of no bytes: zeros.
shoal::PublicKey key_of(const nb::bytes& bytes, const char* what) {
  shoal::PublicKey key{};
  if (bytes.size() && bytes.size() != key.size()) throw std::invalid_argument(std::string(what) + " has " + std::to_string(bytes.size()) + " bytes, not 32");
  std::memcpy(key.data(), bytes.c_str(), bytes.size());
  return key;
}

nb::bytes bytes_of(const shoal::PublicKey& key) { return nb::bytes(reinterpret_cast<const char*>(key.data()), key.size()); }

nb::bytes key_of_listener(const std::string& address, int port, const nb::bytes& secret, double timeout_s) {
  const shoal::Bytes known = secret_of(secret);
  shoal::PublicKey key;
  {
    const WithoutGil released;
    key = shoal::key_of_listener({address, port}, known, timeout_s);
  }
  return bytes_of(key);
}

using PeerTuple = std::tuple<std::string, std::string, int, int, int, nb::bytes>;
using HelperTuple = std::tuple<std::string, int, std::string, nb::bytes>;

void connect(shoal::Engine& engine, const std::vector<PeerTuple>& peers, const std::vector<HelperTuple>& helpers,
             const std::vector<int>& pattern, const std::string& segment, double timeout_s) {
  std::vector<shoal::PeerInfo> peer_infos;
  for (const auto& [host, address, port, global_rank, pid, key] : peers) {
    peer_infos.push_back({host, address, port, global_rank, pid, key_of(key, "a public key")});
  }
  std::vector<shoal::HelperInfo> helper_infos;
  for (const auto& [address, port, name, key] : helpers) helper_infos.push_back({address, port, name, key_of(key, "a public key")});
  const WithoutGil released;
  engine.connect(std::move(peer_infos), std::move(helper_infos), pattern, segment, timeout_s);
}

// Reads the options of shoal.comm.engine.Engine; those that only Python uses are left out.
shoal::EngineOptions options_of(const nb::dict& given) {
  shoal::EngineOptions options;
  const auto read = [&]<class T>(const char* name, T& field) { field = nb::cast<T>(given[name]); };
  read("rank", options.rank);
  read("size", options.size);
  read("group", options.group);
  read("address", options.address);
  read("chunk_bytes", options.chunk_bytes);
  read("shared_chunk_bytes", options.shared_chunk_bytes);
  read("num_slots", options.num_slots);
  read("min_window_bytes", options.min_window_bytes);
  read("window_bytes", options.window_bytes);
  read("target_rtt_s", options.target_rtt_s);
  read("unexpected_bytes", options.unexpected_bytes);
  read("connections_per_peer", options.connections_per_peer);
  read("network_threads", options.network_threads);
  read("send_buffer_bytes", options.send_buffer_bytes);
  read("fabric", options.fabric);
  read("peer_grace_s", options.peer_grace_s);
  read("straggler_s", options.straggler_s);
  read("helper_patience_s", options.helper_patience_s);
  read("workers_serve", options.workers_serve);
  read("share_connections", options.share_connections);
  read("ordered_callbacks", options.ordered_callbacks);
  using PlaceWords = std::tuple<std::string, int, int>;
  if (const auto returning = nb::cast<std::optional<std::vector<PlaceWords>>>(given["returning"])) {
    options.returning.emplace();
    for (const auto& [address, port, pid] : *returning) options.returning->push_back({address, port, pid});
  }
  options.wide_partials = nb::cast<std::string>(given["partial_dtype"]) == "float32";
  options.secret = secret_of(nb::cast<nb::bytes>(given["secret"]));
  options.protection = shoal::protection_named(nb::cast<std::string>(given["protection"]));
  options.private_key = key_of(nb::cast<nb::bytes>(given["private_key"]), "a private key");
  return options;
}

// Reads the blocks of an Operation: an address and a number of elements per rank.
std::vector<shoal::Block> blocks_of(const nb::object& given) {
  std::vector<shoal::Block> blocks;
  for (const auto& [address, count] : nb::cast<std::vector<std::pair<std::uintptr_t, std::uint64_t>>>(given)) {
    blocks.push_back({reinterpret_cast<std::byte*>(address), count});
  }
  return blocks;
}

// Reads a shoal.comm.engine.Operation.
shoal::OpSpec spec_of(const nb::object& operation) {
  const auto get = [&]<class T>(const char* name, T) { return nb::cast<T>(operation.attr(name)); };
  shoal::OpSpec spec;
  spec.kind = shoal::kind_named(get("kind", std::string()));
  spec.element = shoal::element_named(get("dtype", std::string()));
  spec.count = get("count", spec.count);
  spec.root = get("root", spec.root);
  spec.input = reinterpret_cast<const std::byte*>(get("input", std::uintptr_t{}));
  spec.output = reinterpret_cast<std::byte*>(get("output", std::uintptr_t{}));
  spec.timeout_s = get("timeout_s", spec.timeout_s);
  spec.priority = get("priority", spec.priority);
  spec.shape = get("shape", spec.shape);
  if (shoal::by_messages(spec.kind)) {
    spec.inputs = blocks_of(operation.attr("inputs"));
    spec.outputs = blocks_of(operation.attr("outputs"));
    spec.tag = get("tag", spec.tag);
    spec.source = reinterpret_cast<std::int32_t*>(get("source_rank", std::uintptr_t{}));
  }
  if (shoal::is_served(spec.kind)) {
    std::tie(spec.table, spec.step, spec.rule, spec.place) =
        get("served", std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint64_t>{});
    spec.name = get("text", std::string());
    spec.weights = shoal::element_named(get("weights", std::string()));
    spec.copied = get("copied", spec.copied);
    spec.columns = get("columns", spec.columns);
  }
  const auto op = get("op", std::string());
  if (spec.kind == shoal::Kind::delegated) spec.name = op;
  else spec.combine = shoal::combine_named(op);
  return spec;
}

template <class Group>
std::uint64_t submit(Group& group, const nb::object& operation) {
  shoal::OpSpec spec = spec_of(operation);
  const WithoutGil released;
  return group.submit(std::move(spec));
}

// Calls a Python function once an operation has ended, as Engine::then().
template <class Group>
void then(std::shared_ptr<Group> group, std::uint64_t handle, nb::object function) {
  const std::shared_ptr<nb::object> kept(new nb::object(std::move(function)), [](nb::object* each) {
    if (!nb::is_alive()) return;  // the interpreter has ended: nobody can destroy Python objects now
    const WithGil gil;
    delete each;
  });
  Group& on = *group;
  const WithoutGil released;
  on.then(handle, [group = std::move(group), kept] {
    if (!nb::is_alive()) return;
    const WithGil gil;
    try {
      (*kept)();
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("a function that was called at the end of an operation");
    }
  });
}

// Raises errors of a group as the exceptions that Python defines.
void raise_group_error(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const shoal::GroupError& failure) {
    PyErr_SetString(nb::module_::import_("shoal.comm.engine").attr("CommError").ptr(), failure.what());
  } catch (const shoal::OrderError& wrong) {
    PyErr_SetString(nb::module_::import_("shoal.errors").attr("UsageError").ptr(), wrong.what());
  }
}

// Returns the address of a new shoal_group (csrc/c_api/shoal.h), which keeps the engine alive.
std::uintptr_t c_group(std::shared_ptr<shoal::Engine> engine, int rank, int size) {
  return reinterpret_cast<std::uintptr_t>(shoal::share_engine(std::move(engine), rank, size));
}

std::vector<std::tuple<std::string, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>> take_trace(
    shoal::Engine& engine) {
  std::vector<std::tuple<std::string, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>> events;
  for (const shoal::TraceEvent& each : engine.take_trace()) {
    events.emplace_back(each.what, each.begin_ns, each.end_ns, each.seq, each.chunk);
  }
  return events;
}

std::vector<std::pair<std::uint64_t, std::uint64_t>> server_times(const shoal::Engine& engine) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> times;
  for (const shoal::ServerTime& each : engine.server_times()) times.emplace_back(each.chunks, each.ns);
  return times;
}

// Returns name, minimum, maximum and divisor of the options that the core checks.
std::vector<std::tuple<std::string, std::size_t, std::size_t, std::size_t>> option_ranges() {
  std::vector<std::tuple<std::string, std::size_t, std::size_t, std::size_t>> ranges;
  for (const shoal::OptionRange& each : shoal::option_ranges()) ranges.emplace_back(each.name, each.least, each.most, each.unit);
  return ranges;
}

constexpr double kLongestS = 1e9;  // longer ones do not fit into nanoseconds

// Address of a table on the device (0: is not copied), its rows, and its first row in a buffer.
using TableTuple = std::tuple<std::uintptr_t, std::size_t, std::size_t>;

shoal::DeviceTable table_of(const TableTuple& given) {
  return {reinterpret_cast<std::byte*>(std::get<0>(given)), std::get<1>(given), std::get<2>(given)};
}

template <class Group>
std::uint64_t begin_transfer(shoal::Lane& lane, std::shared_ptr<Group> engine, const nb::object& operation,
                             const TableTuple& source, const TableTuple& target, std::size_t buffer_rows, std::size_t width,
                             std::size_t columns, std::uintptr_t ready, double timeout_s) {
  shoal::Transfer transfer{spec_of(operation), table_of(source), table_of(target), buffer_rows, width, columns,
                           reinterpret_cast<shoal::CudaEvent>(ready), std::chrono::steady_clock::now() + shoal::seconds(std::min(timeout_s, kLongestS))};
  auto chunks = lane.engine_of(engine.get(), [&] { return std::make_shared<shoal::ChunkEngineOf<Group>>(engine); });
  const WithoutGil released;
  return lane.begin(std::move(chunks), std::move(transfer));
}

template <class Group>
std::uint64_t begin_messages(shoal::Lane& lane, std::shared_ptr<Group> engine, const nb::object& operation, std::uintptr_t ready,
                             double timeout_s) {
  return begin_transfer<Group>(lane, std::move(engine), operation, {}, {}, 0, 0, 0, ready, timeout_s);
}

void bind_lane(nb::module_& m) {
  using Release = nb::call_guard<WithoutGil>;
  nb::class_<shoal::Lane>(m, "Lane")
      .def("__init__",
           [](shoal::Lane* self, const std::string& library, int device, std::uintptr_t to_host, std::uintptr_t to_device,
              std::size_t num_buffers, std::size_t buffer_bytes) {
             new (self) shoal::Lane(shoal::CudaRuntime(library),
                                    {device, reinterpret_cast<shoal::CudaStream>(to_host),
                                     reinterpret_cast<shoal::CudaStream>(to_device), num_buffers, buffer_bytes});
           })
      .def("begin", &begin_transfer<shoal::Engine>)
      .def("begin", &begin_transfer<shoal::SingleRank>)
      .def("begin_messages", &begin_messages<shoal::Engine>)
      .def("begin_messages", &begin_messages<shoal::SingleRank>)
      .def("next_ended", &shoal::Lane::next_ended, Release())
      .def("wait", &shoal::Lane::wait, Release())
      .def("counters", &shoal::Lane::counters)
      .def("stop", &shoal::Lane::stop, Release());
}

// Groups are made as shared pointers, not inside of their Python objects: threads that know nothing of Python let them go.
void bind_engine(nb::module_& m) {
  using Release = nb::call_guard<WithoutGil>;
  nb::register_exception_translator(raise_group_error);
  m.def("option_ranges", &option_ranges);
  m.def("key_of_listener", &key_of_listener, nb::arg("address"), nb::arg("port"), nb::arg("secret"), nb::arg("timeout_s"));
  nb::dict optimizers;
  optimizers["sgd"] = static_cast<std::uint32_t>(shoal::Rule::Optimizer::sgd);
  optimizers["adamw"] = static_cast<std::uint32_t>(shoal::Rule::Optimizer::adamw);
  optimizers["lamb"] = static_cast<std::uint32_t>(shoal::Rule::Optimizer::lamb);
  optimizers["lans"] = static_cast<std::uint32_t>(shoal::Rule::Optimizer::lans);
  optimizers["lars"] = static_cast<std::uint32_t>(shoal::Rule::Optimizer::lars);
  optimizers["novograd"] = static_cast<std::uint32_t>(shoal::Rule::Optimizer::novograd);
  optimizers["adafactor"] = static_cast<std::uint32_t>(shoal::Rule::Optimizer::adafactor);
  m.attr("SERVED_OPTIMIZERS") = optimizers;
  m.attr("SERVED_BLOCK") = shoal::kServedBlock;
  m.attr("SERVED_UNIT") = shoal::kServedUnit;
  m.attr("SERVED_SUMS") = shoal::kSums;
  m.attr("SERVED_COEFFICIENTS") = shoal::kCoefficients;
  m.attr("FACTOR_PART") = shoal::kFactorPart;
  nb::class_<shoal::Engine>(m, "Engine")
      .def(nb::new_([](const nb::dict& options) { return std::make_shared<shoal::Engine>(options_of(options)); }))
      .def_prop_ro("port", &shoal::Engine::port)
      .def_prop_ro("public_key",
                   [](const shoal::Engine& engine) { return bytes_of(engine.public_key()); })
      .def("connect", &connect)
      .def("c_group", &c_group)
      .def("set_pattern", &shoal::Engine::set_pattern, Release())
      .def("submit", &submit<shoal::Engine>)
      .def("finish_delegated", &shoal::Engine::finish_delegated, Release())
      .def("wait", &shoal::Engine::wait, Release())
      .def("is_done", &shoal::Engine::is_done, Release())
      .def("then", &then<shoal::Engine>)
      .def_prop_ro("num_submitted", &shoal::Engine::num_submitted)
      .def("error", &shoal::Engine::error, Release())
      .def("abort", &shoal::Engine::abort, Release())
      .def("close", &shoal::Engine::close, Release())
      .def("counters", &shoal::Engine::counters, Release())
      .def("take_events", &shoal::Engine::take_events, Release())
      .def("lost_helpers", &shoal::Engine::lost_helpers, Release())
      .def("lost_ranks", &shoal::Engine::lost_ranks, Release())
      .def("server_times", &server_times)
      .def("trace", &shoal::Engine::trace)
      .def("take_trace", &take_trace);
  nb::class_<shoal::SingleRank>(m, "SingleRank")
      .def(nb::new_([] { return std::make_shared<shoal::SingleRank>(); }))
      .def("c_group", [](std::shared_ptr<shoal::SingleRank> single) {
        return reinterpret_cast<std::uintptr_t>(shoal::share_single(std::move(single)));
      })
      .def("submit", &submit<shoal::SingleRank>)
      .def("finish_delegated", &shoal::SingleRank::finish_delegated)
      .def("wait", &shoal::SingleRank::wait)
      .def("is_done", &shoal::SingleRank::is_done)
      .def("then", &then<shoal::SingleRank>)
      .def_prop_ro("num_submitted", &shoal::SingleRank::num_submitted)
      .def("error", &shoal::SingleRank::error)
      .def("abort", &shoal::SingleRank::abort)
      .def("close", &shoal::SingleRank::close)
      .def("counters", &shoal::SingleRank::counters)
      .def("take_events", &shoal::SingleRank::take_events);
  nb::class_<shoal::HelperServer>(m, "HelperServer")
      .def("__init__",
           [](shoal::HelperServer* self, const std::string& address, int port, const nb::bytes& secret,
              int send_buffer_bytes, const std::string& fabric, std::size_t max_weight_bytes, int network_threads,
              std::size_t max_sum_bytes) {
             new (self) shoal::HelperServer(address, port, secret_of(secret), send_buffer_bytes, fabric, 0,
                                            shoal::HelperServer::kMaxGroups, max_weight_bytes, network_threads, max_sum_bytes);
           },
           nb::arg("address"), nb::arg("port"), nb::arg("secret"), nb::arg("send_buffer_bytes"), nb::arg("fabric") = "",
           nb::arg("max_weight_bytes") = 0, nb::arg("network_threads") = 1, nb::arg("max_sum_bytes") = 0)
      .def_prop_ro("port", &shoal::HelperServer::port)
      .def("start", &shoal::HelperServer::start, Release())
      .def("stop", &shoal::HelperServer::stop, Release())
      .def("counters", &shoal::HelperServer::counters, Release());
}

// Returns (built, version, problem, ((provider, problem), ...)), the state of libfabric on this machine.
std::tuple<bool, std::string, std::string, std::vector<std::pair<std::string, std::string>>> fabric_state(
    const std::string& address) {
  shoal::FabricState state = shoal::look_at_fabric(address);
  std::vector<std::pair<std::string, std::string>> providers;
  for (shoal::FabricProvider& each : state.providers) providers.emplace_back(std::move(each.name), std::move(each.problem));
  return {state.built, state.version, state.problem, std::move(providers)};
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "shoal's C++ core; use it through shoal.native";
  nb::set_leak_warnings(false);  // a process that exits without destroy_process_group() leaks its engine
  m.def("cpu_features", &cpu_features);
  m.def("simd_levels", &simd_levels);
  m.def("crc32c", [](const nb::bytes& data) { return shoal::crc32c(data.c_str(), data.size()); }, nb::arg("data"));
  m.def("fabric_state", &fabric_state, nb::call_guard<WithoutGil>());
  // noconvert: the sum would be written to a converted copy of the output
  m.def("sum_in_rank_order", &sum_in_rank_order, nb::arg("out").noconvert(), nb::arg("inputs").noconvert(),
        nb::arg("dtype").none(), nb::arg("num_threads"), nb::arg("level").none());
  bind_moments_step<shoal::adamw_step>(m, "adamw_step");
  m.def("sgd_step", &sgd_step, nb::arg("weights"), nb::arg("grads"), nb::arg("momenta"), nb::arg("counts"),
        nb::kw_only(), nb::arg("learning_rate"), nb::arg("momentum"), nb::arg("weight_decay"),
        nb::arg("grad_scale"), nb::arg("nesterov"), nb::arg("num_threads"), nb::arg("level").none());
  m.def("lamb_step", &lamb_step, nb::arg("weights"), nb::arg("grads"), nb::arg("exp_avgs"),
        nb::arg("exp_avg_sqs"), nb::arg("counts"), nb::arg("steps"), nb::kw_only(), nb::arg("learning_rate"),
        nb::arg("beta1"), nb::arg("beta2"), nb::arg("eps"), nb::arg("weight_decay"), nb::arg("grad_scale"),
        nb::arg("bias_correction"), nb::arg("trust_ratio"), nb::arg("num_threads"), nb::arg("level").none());
  bind_moments_step<shoal::lans_step>(m, "lans_step");
  m.def("lars_step", &lars_step, nb::arg("weights"), nb::arg("grads"), nb::arg("momenta"), nb::arg("counts"),
        nb::kw_only(), nb::arg("learning_rate"), nb::arg("momentum"), nb::arg("weight_decay"), nb::arg("eta"),
        nb::arg("eps"), nb::arg("grad_scale"), nb::arg("clips"), nb::arg("nesterov"), nb::arg("trust_ratio"),
        nb::arg("num_threads"), nb::arg("level").none());
  m.def("novograd_step", &novograd_step, nb::arg("weights"), nb::arg("grads"), nb::arg("momenta"),
        nb::arg("norm_sqs"), nb::arg("counts"), nb::arg("steps"), nb::kw_only(), nb::arg("learning_rate"),
        nb::arg("beta1"), nb::arg("beta2"), nb::arg("eps"), nb::arg("weight_decay"), nb::arg("grad_scale"),
        nb::arg("bias_correction"), nb::arg("grad_averaging"), nb::arg("init_zero"),
        nb::arg("reg_inside_moment"), nb::arg("num_threads"), nb::arg("level").none());
  m.def("adafactor_step", &adafactor_step, nb::arg("weights"), nb::arg("grads"), nb::arg("row_vars"), nb::arg("col_vars"),
        nb::arg("counts"), nb::arg("columns"), nb::arg("shares"), nb::kw_only(), nb::arg("learning_rate"), nb::arg("eps1"),
        nb::arg("weight_decay"), nb::arg("grad_scale"), nb::arg("num_threads"), nb::arg("level").none());
  m.def("sum_of_squares", &sum_of_squares, nb::arg("values"), nb::arg("counts"), nb::arg("num_threads"),
        nb::arg("level").none());
  m.def("unit_totals", &unit_totals, nb::arg("units"), nb::arg("counts"));
  m.def("lamb_coefficients", &lamb_coefficients, nb::arg("total"), nb::kw_only(), nb::arg("learning_rate"),
        nb::arg("trust_ratio"));
  m.def("lans_grad_scale", &lans_grad_scale, nb::arg("total"), nb::kw_only(), nb::arg("grad_scale"), nb::arg("eps"));
  m.def("lans_coefficients", &lans_coefficients, nb::arg("total"), nb::kw_only(), nb::arg("learning_rate"),
        nb::arg("beta1"));
  m.def("factor_numbers", &shoal::factor_numbers, nb::arg("columns"));
  m.def("adafactor_decide",
        [](std::uintptr_t sums, std::size_t count, std::size_t columns, double share, double eps1, std::uintptr_t row_var,
           std::uintptr_t col_var, std::uintptr_t factors) {
          shoal::adafactor_decide(floats_at(sums), count, columns, share, eps1, floats_at(row_var), floats_at(col_var),
                                  floats_at(factors));
        },
        nb::arg("sums"), nb::arg("count"), nb::arg("columns"), nb::arg("share"), nb::arg("eps1"), nb::arg("row_var"),
        nb::arg("col_var"), nb::arg("factors"));
  m.def("adafactor_coefficients", &adafactor_coefficients, nb::arg("total"), nb::arg("count"), nb::kw_only(),
        nb::arg("learning_rate"), nb::arg("weight_decay"));
  m.def("lars_coefficients", &lars_coefficients, nb::arg("total"), nb::kw_only(), nb::arg("learning_rate"),
        nb::arg("momentum"), nb::arg("weight_decay"), nb::arg("eta"), nb::arg("eps"), nb::arg("clips"),
        nb::arg("nesterov"), nb::arg("trust_ratio"));
  m.def("novograd_coefficients", &novograd_coefficients, nb::arg("total"), nb::arg("norm_sq"), nb::arg("step"),
        nb::kw_only(), nb::arg("learning_rate"), nb::arg("beta1"), nb::arg("beta2"), nb::arg("eps"),
        nb::arg("weight_decay"), nb::arg("bias_correction"), nb::arg("grad_averaging"), nb::arg("init_zero"),
        nb::arg("reg_inside_moment"));
  m.def("finish_image", &finish_image, nb::arg("pixels").noconvert(), nb::arg("out").noconvert(),
        nb::arg("steps"), nb::arg("scale"), nb::arg("shift"), nb::arg("flip"), nb::arg("level").none());
  bind_detection(m);
  bind_engine(m);
  bind_lane(m);
}
