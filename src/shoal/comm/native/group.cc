// The short way into backend "shoal": a c10d::Backend that hands the frequent operations of contiguous CPU tensors to
// the engine without Python and without the GIL. Everything else is passed to the ShoalProcessGroup
// (shoal/comm/backend.py), which has the same engine and so the same sequence of operations and callbacks.
//
// Built on first use by shoal/comm/native_group.py. Uses the engine through the C interface only (shoal.h).
#include <shoal.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "works.h"

namespace shoal_torch {
namespace {

// ---- tensors as the engine takes them: contiguous memory of a type that it knows ---------------------------

std::optional<shoal_dtype> dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return SHOAL_FLOAT32;
    case at::kDouble: return SHOAL_FLOAT64;
    case at::kHalf: return SHOAL_FLOAT16;
    case at::kBFloat16: return SHOAL_BFLOAT16;
    case at::kChar: return SHOAL_INT8;
    case at::kByte: return SHOAL_UINT8;
    case at::kInt: return SHOAL_INT32;
    case at::kLong: return SHOAL_INT64;
    default: return std::nullopt;
  }
}

// Returns whether the tensor's memory holds its elements in order, and the engine knows their type.
bool is_plain(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() && !tensor.is_neg() &&
         dtype_of(tensor).has_value();
}

bool is_plain(const std::vector<at::Tensor>& tensors) { return tensors.size() == 1 && is_plain(tensors[0]); }

// Returns the engine's reduction of a tensor if it needs no step before or after it.
std::optional<shoal_reduction> reduction_of(const c10d::ReduceOp& op, const at::Tensor& tensor) {
  const bool is_float = tensor.is_floating_point();
  switch (op.op_) {
    case c10d::ReduceOp::SUM: return SHOAL_SUM;
    case c10d::ReduceOp::AVG: return is_float ? std::optional(SHOAL_AVG) : std::nullopt;
    case c10d::ReduceOp::PRODUCT: return SHOAL_PROD;
    case c10d::ReduceOp::MIN: return SHOAL_MIN;
    case c10d::ReduceOp::MAX: return SHOAL_MAX;
    case c10d::ReduceOp::BAND: return is_float ? std::nullopt : std::optional(SHOAL_BAND);
    case c10d::ReduceOp::BOR: return is_float ? std::nullopt : std::optional(SHOAL_BOR);
    case c10d::ReduceOp::BXOR: return is_float ? std::nullopt : std::optional(SHOAL_BXOR);
    default: return std::nullopt;
  }
}

bool overlap(const at::Tensor& one, const at::Tensor& other) {
  const auto* a = static_cast<const char*>(one.const_data_ptr());
  const auto* b = static_cast<const char*>(other.const_data_ptr());
  return a < b + other.nbytes() && b < a + one.nbytes();
}

shoal_operation operation_of(shoal_kind kind, const at::Tensor& input, const at::Tensor& output) {
  shoal_operation operation{};
  operation.struct_size = sizeof operation;
  operation.kind = kind;
  operation.dtype = *dtype_of(input);
  operation.input = input.const_data_ptr();
  operation.output = output.data_ptr();
  operation.count = static_cast<std::uint64_t>(input.numel());
  operation.shape = input.sizes().data();
  operation.num_dims = static_cast<std::uint32_t>(input.dim());
  return operation;
}

using Blocks = std::vector<shoal_block>;

// Returns the memory of a tensor for each rank, all of one type; nothing where Python must prepare or refuse them.
std::optional<Blocks> blocks_of(const std::vector<at::Tensor>& tensors, int size, at::ScalarType type) {
  if (static_cast<int>(tensors.size()) != size) return std::nullopt;
  Blocks blocks;
  for (const at::Tensor& each : tensors) {
    if (!is_plain(each) || each.scalar_type() != type) return std::nullopt;
    blocks.push_back({each.data_ptr(), static_cast<std::uint64_t>(each.numel())});
  }
  return blocks;
}

// Returns the parts of a tensor that is split along its first dimension, equally for no sizes; else as blocks_of().
std::optional<Blocks> rows_of(const at::Tensor& tensor, const std::vector<int64_t>& sizes, int size) {
  if (!is_plain(tensor) || tensor.dim() == 0) return std::nullopt;
  const int64_t rows = tensor.size(0), width = rows ? tensor.numel() / rows : 0;
  if (sizes.empty() ? rows % size != 0 : static_cast<int>(sizes.size()) != size) return std::nullopt;
  Blocks blocks;
  int64_t begin = 0;
  for (int rank = 0; rank < size; ++rank) {
    const int64_t count = sizes.empty() ? rows / size : sizes[static_cast<std::size_t>(rank)];
    if (count < 0 || count > rows - begin) return std::nullopt;
    char* data = static_cast<char*>(tensor.data_ptr()) + begin * width * tensor.element_size();
    blocks.push_back({data, static_cast<std::uint64_t>(count * width)});
    begin += count;
  }
  return begin == rows ? std::optional(std::move(blocks)) : std::nullopt;
}

// ---- the backend ----------------------------------------------------------------------------------------

// Takes over a reference to a C group, whose address Python has as a number.
CGroup c_group_of(const py::int_& address) {
  return CGroup(reinterpret_cast<shoal_group*>(address.cast<std::uintptr_t>()));
}

class ShoalBackend final : public c10d::Backend {
 public:
  ShoalBackend(std::shared_ptr<GroupState> state, int rank, int size)
      : c10d::Backend(rank, size), state_(std::move(state)) {}

  std::shared_ptr<GroupState> state() const {
    const std::lock_guard lock(state_mutex_);
    return state_;
  }
  py::object python() const { return state()->python(); }  // with the GIL

  const std::string getBackendName() const override { return "shoal"; }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(getBackendName(), state()->timeout());
  }

  // ---- collectives of the engine

  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override {
    const auto reduction = is_plain(tensors) ? reduction_of(opts.reduceOp, tensors[0]) : std::nullopt;
    if (!reduction || opts.sparseIndices) return delegate("allreduce", tensors, opts);
    shoal_operation operation = operation_of(SHOAL_ALL_REDUCE, tensors[0], tensors[0]);
    operation.reduction = *reduction;
    return submit("all_reduce", c10d::OpType::ALLREDUCE, operation, opts.timeout, tensors[0], tensors[0]);
  }

  WorkPtr reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts) override {
    const auto reduction = is_plain(tensors) ? reduction_of(opts.reduceOp, tensors[0]) : std::nullopt;
    if (!reduction) return delegate("reduce", tensors, opts);
    shoal_operation operation = operation_of(SHOAL_REDUCE, tensors[0], tensors[0]);
    operation.reduction = *reduction;
    operation.root = static_cast<std::int32_t>(opts.rootRank);
    return submit("reduce", c10d::OpType::REDUCE, operation, opts.timeout, tensors[0], tensors[0]);
  }

  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts) override {
    if (!is_plain(tensors)) return delegate("broadcast", tensors, opts);
    shoal_operation operation = operation_of(SHOAL_BROADCAST, tensors[0], tensors[0]);
    operation.root = static_cast<std::int32_t>(opts.rootRank);
    return submit("broadcast", c10d::OpType::BROADCAST, operation, opts.timeout, tensors[0], tensors[0]);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    const bool fits = is_plain(output) && is_plain(input) && has_rows(output, input);
    const auto row_begin = fits ? static_cast<const char*>(output.const_data_ptr()) + rank_ * input.nbytes() : nullptr;
    if (!fits || (overlap(output, input) && input.const_data_ptr() != row_begin)) {
      return delegate("_allgather_base", output, input, opts);
    }
    const shoal_operation operation = operation_of(SHOAL_ALL_GATHER, input, output);
    return submit("all_gather", c10d::OpType::_ALLGATHER_BASE, operation, opts.timeout, input, output);
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    const bool fits = is_plain(output) && is_plain(input) && has_rows(input, output) && !overlap(output, input);
    const auto reduction = fits ? reduction_of(opts.reduceOp, input) : std::nullopt;
    if (!reduction) return delegate("_reduce_scatter_base", output, input, opts);
    shoal_operation operation = operation_of(SHOAL_REDUCE_SCATTER, output, output);
    operation.input = input.const_data_ptr();
    operation.reduction = *reduction;
    return submit("reduce_scatter", c10d::OpType::_REDUCE_SCATTER_BASE, operation, opts.timeout, input, output);
  }

  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    shoal_operation operation{};
    operation.struct_size = sizeof operation;
    operation.kind = SHOAL_BARRIER;
    operation.dtype = SHOAL_UINT8;
    return submit("barrier", c10d::OpType::BARRIER, operation, opts.timeout, at::Tensor(), at::Tensor());
  }

  // ---- messages: what does not fit goes to Python, which names the mistake

  WorkPtr alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                   const c10d::AllToAllOptions& opts) override {
    const auto type = inputs.empty() ? at::kFloat : inputs[0].scalar_type();
    const auto from = blocks_of(inputs, size_, type), to = blocks_of(outputs, size_, type);
    if (!from || !to || own(*from).count != own(*to).count) return delegate("alltoall", outputs, inputs, opts);
    return all_to_all(c10d::OpType::ALLTOALL, *from, *to, inputs, outputs, opts);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& opts) override {
    const bool fits = input.scalar_type() == output.scalar_type() && !overlap(input, output);
    const auto from = fits ? rows_of(input, input_sizes, size_) : std::nullopt;
    const auto to = fits ? rows_of(output, output_sizes, size_) : std::nullopt;
    if (!from || !to || own(*from).count != own(*to).count) {
      return delegate("alltoall_base", output, input, output_sizes, input_sizes, opts);
    }
    return all_to_all(c10d::OpType::ALLTOALL_BASE, *from, *to, {input}, {output}, opts);
  }
  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    if (!is_plain(tensors)) return delegate("send", tensors, to, tag);
    return message("send", c10d::OpType::SEND, SHOAL_SEND, tensors[0], to, tag);
  }
  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    if (!is_plain(tensors)) return delegate("recv", tensors, from, tag);
    return message("recv", c10d::OpType::RECV, SHOAL_RECV, tensors[0], from, tag);
  }
  WorkPtr recvAnysource(std::vector<at::Tensor>& tensors, int tag) override {
    if (!is_plain(tensors)) return delegate("recv_anysource", tensors, tag);
    return message("recv", c10d::OpType::RECVANYSOURCE, SHOAL_RECV, tensors[0], -1, tag);
  }

  // ---- what Python prepares and submits

  WorkPtr allreduce_sparse(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override {
    return delegate("allreduce", tensors, opts);
  }
  WorkPtr allreduce_coalesced(std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return delegate("allreduce_coalesced", tensors, opts);
  }
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                    const c10d::AllgatherOptions& opts) override {
    return delegate("allgather", outputs, inputs, opts);
  }
  WorkPtr allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                              const c10d::AllgatherOptions& opts) override {
    return delegate("allgather_coalesced", outputs, inputs, opts);
  }
  WorkPtr allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    return delegate("allgather_into_tensor_coalesced", outputs, inputs, opts);
  }
  WorkPtr reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    return delegate("reduce_scatter", outputs, inputs, opts);
  }
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    return delegate("reduce_scatter_tensor_coalesced", outputs, inputs, opts);
  }
  WorkPtr gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                 const c10d::GatherOptions& opts) override {
    return delegate("gather", outputs, inputs, opts);
  }
  // torch 2.11 does not have it: an override from 2.12 on.
  WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) {
    return delegate("gather_into_tensor", output, input, opts);
  }
  WorkPtr scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                  const c10d::ScatterOptions& opts) override {
    return delegate("scatter", outputs, inputs, opts);
  }
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override {
    const shoal::WithGil gil;
    python().attr("monitored_barrier")(state()->limit(opts.timeout), wait_all_ranks);
  }

  // ---- coalescing

  void startCoalescing() override {
    const std::lock_guard lock(coalescing_mutex_);
    coalescing_.emplace();
  }
  WorkPtr endCoalescing() override {
    const std::lock_guard lock(coalescing_mutex_);
    auto works = std::exchange(coalescing_, std::nullopt).value_or(std::vector<WorkPtr>{});
    return c10::make_intrusive<JoinedWork>(std::move(works));
  }

  // ---- the group

#ifdef C10D_BACKEND_HAS_RECONFIGURE  // torch 2.14
  bool supportsReconfigure() const override { return true; }
  c10d::ReconfigureHandle get_reconfigure_handle() const override {
    const shoal::WithGil gil;
    return python().attr("get_reconfigure_handle")().cast<std::string>();
  }
  WorkPtr reconfigure(const c10d::ReconfigureOptions& opts) override {
    const shoal::WithGil gil;
    const py::object group = python();
    group.attr("reconfigure")(opts);
    const py::object engine = group.attr("engine"), idle = group.attr("operations").attr("idle");
    auto next = std::make_shared<GroupState>(group, idle, c_group_of(engine.attr("c_group")()), state()->timeout());
    const std::lock_guard lock(state_mutex_);
    rank_ = group.attr("getRank")().cast<int>();
    size_ = group.attr("getSize")().cast<int>();
    state_.swap(next);
    return c10::make_intrusive<JoinedWork>(std::vector<WorkPtr>{});
  }
#endif

  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& opts) override;

  uint64_t getSequenceNumberForGroup() override {
    const shoal::WithGil gil;
    return python().attr("getSequenceNumberForGroup")().cast<uint64_t>();
  }
  void setSequenceNumberForGroup() override {}

  void setTimeout(Milliseconds timeout) override {
    state()->set_timeout(timeout);
    const shoal::WithGil gil;
    python().attr("set_timeout")(timeout);
  }

  void abort() override {
    const shoal::WithGil gil;
    python().attr("abort")();
  }
  void shutdown() override { state()->shutdown(); }

 private:
  bool has_rows(const at::Tensor& large, const at::Tensor& small) const {
    return large.scalar_type() == small.scalar_type() && large.numel() == size_ * small.numel();
  }

  WorkPtr submit(const char* name, c10d::OpType type, shoal_operation operation, Milliseconds timeout,
                 const at::Tensor& input, const at::Tensor& output) {
    const auto group = state();
    operation.timeout_s = group->limit_s(timeout);
    std::vector<at::Tensor> tensors, outputs;
    if (input.defined()) tensors = {input, output}, outputs = {output};
    const shoal_handle handle = group->submit(name, operation, std::move(tensors));
    return coalesced(c10::make_intrusive<EngineWork>(group, handle, type, name, std::move(outputs)));
  }

  const shoal_block& own(const Blocks& blocks) const { return blocks[static_cast<std::size_t>(rank_)]; }

  WorkPtr all_to_all(c10d::OpType type, const Blocks& from, const Blocks& to, const std::vector<at::Tensor>& inputs,
                     const std::vector<at::Tensor>& outputs, const c10d::AllToAllOptions& opts) {
    shoal_operation operation = operation_of(SHOAL_ALL_TO_ALL, inputs[0], outputs[0]);
    const auto total = std::accumulate(from.begin(), from.end(), std::int64_t{0}, [](std::int64_t sum, const shoal_block& each) {
      return sum + static_cast<std::int64_t>(each.count);
    });
    operation.count = static_cast<std::uint64_t>(total);
    if (inputs.size() > 1) operation.shape = &total, operation.num_dims = 1;
    operation.inputs = from.data();
    operation.outputs = to.data();
    const auto group = state();
    operation.timeout_s = group->limit_s(opts.timeout);
    std::vector<at::Tensor> tensors = inputs;
    tensors.insert(tensors.end(), outputs.begin(), outputs.end());
    const shoal_handle handle = group->submit("all_to_all", operation, std::move(tensors));
    return coalesced(c10::make_intrusive<EngineWork>(group, handle, type, "all_to_all", outputs));
  }

  WorkPtr message(const char* name, c10d::OpType type, shoal_kind kind, const at::Tensor& tensor, int peer, int tag) {
    shoal_operation operation = operation_of(kind, tensor, tensor);
    const at::Tensor source = at::full({1}, -1, at::kInt);
    operation.root = peer;
    operation.tag = tag;
    operation.source = source.data_ptr<int>();
    const auto group = state();
    operation.timeout_s = group->limit_s(c10d::kUnsetTimeout);
    const shoal_handle handle = group->submit(name, operation, {tensor, source});
    std::vector<at::Tensor> outputs;
    if (kind == SHOAL_RECV) outputs = {tensor};
    return coalesced(c10::make_intrusive<EngineWork>(group, handle, type, name, std::move(outputs), source));
  }

  // Calls a method of the Python group that returns a work.
  template <class... Args>
  WorkPtr delegate(const char* method, const Args&... args) {
    const shoal::WithGil gil;
    const auto group = state();
    group->delegated();
    return coalesced(c10::make_intrusive<PythonWork>(group->python().attr(method)(args...)));
  }

  WorkPtr coalesced(WorkPtr work) {
    const std::lock_guard lock(coalescing_mutex_);
    if (coalescing_) coalescing_->push_back(work);
    return work;
  }

  mutable std::mutex state_mutex_;
  std::shared_ptr<GroupState> state_;
  std::mutex coalescing_mutex_;
  std::optional<std::vector<WorkPtr>> coalescing_;
};

// Makes the backend of a ShoalProcessGroup. `group` is the address of a reference to its engine's C group, which the
// backend takes over.
c10::intrusive_ptr<c10d::Backend> create(py::object python, py::object idle, const py::int_& group, int rank, int size,
                                         Milliseconds timeout) {
  auto state = std::make_shared<GroupState>(std::move(python), std::move(idle), c_group_of(group), timeout);
  return c10::make_intrusive<ShoalBackend>(std::move(state), rank, size);
}

c10::intrusive_ptr<c10d::Backend> ShoalBackend::split(const c10::intrusive_ptr<c10d::Store>&,
                                                      const std::vector<int>& ranks,
                                                      const c10::intrusive_ptr<Options>& opts) {
  const shoal::WithGil gil;
  const py::object group = python().attr("split_group")(ranks, opts->timeout, py::none(), opts->group_name);
  if (group.is_none()) return nullptr;
  return py::module_::import("shoal.comm.native_group").attr("wrap")(group).cast<c10::intrusive_ptr<c10d::Backend>>();
}

ShoalBackend& native(const c10::intrusive_ptr<c10d::Backend>& backend) {
  auto* found = dynamic_cast<ShoalBackend*>(backend.get());
  if (!found) throw py::type_error("the backend is not shoal's native one");
  return *found;
}

// ---- negated and conjugated views -----------------------------------------------------------------------
// torch gives an operator copies of tensors whose memory is negated or conjugated, unless it is known to write to them,
// which c10d's operators do without saying so: their results would be lost with the copies. The groups of this file
// take such tensors themselves; other backends get copies as before.

// Returns whether the operator's process group is one of this file's, for the device of its first tensor.
bool is_own_group(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> device;
  for (std::size_t k = 0; k < arguments.size(); ++k) {
    const c10::IValue& each = arguments[k];
    if (!device && each.isTensor() && each.toTensor().defined()) device = each.toTensor().device();
    if (!device && each.isTensorList() && !each.toTensorVector().empty()) device = each.toTensorVector()[0].device();
    if (!device || op.schema().arguments()[k].name() != "process_group") continue;
    const auto group = each.toCustomClass<c10d::ProcessGroup>();
    return dynamic_cast<ShoalBackend*>(group->getBackend(device->type()).get()) != nullptr;
  }
  return false;
}

at::Tensor resolved(const at::Tensor& tensor) { return tensor.resolve_conj().resolve_neg(); }

// Returns a tensor, or a list of tensors, as tensors whose memory holds their elements, as torch does.
c10::IValue resolved(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? resolved(value.toTensor()) : value;
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list;
  for (const at::Tensor& each : value.toTensorVector()) list.push_back(resolved(each));
  return list;
}

void take_lazy_views(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  if (!is_own_group(op, arguments)) {
    for (auto at = stack->end() - static_cast<std::ptrdiff_t>(arguments.size()); at != stack->end(); ++at) *at = resolved(*at);
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Conjugate), stack);
}

void for_all_collectives(torch::Library& library) {
  for (const c10::OperatorName& each : c10::Dispatcher::singleton().getAllOpNames()) {
    if (each.getNamespace() != "c10d") continue;
    library.impl(each.name.c_str(), torch::CppFunction::makeFromBoxedFunction<&take_lazy_views>());
  }
}

TORCH_LIBRARY_IMPL(c10d, Negative, library) { for_all_collectives(library); }
TORCH_LIBRARY_IMPL(c10d, Conjugate, library) { for_all_collectives(library); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "shoal's process group in C++; use it through shoal.comm.native_group";
  module.def("create", &create);
  module.def("is_native", [](const c10::intrusive_ptr<c10d::Backend>& backend) {
    return dynamic_cast<ShoalBackend*>(backend.get()) != nullptr;
  });
  module.def("python_group", [](const c10::intrusive_ptr<c10d::Backend>& backend) { return native(backend).python(); });
  module.def("num_pending", [](const c10::intrusive_ptr<c10d::Backend>& backend) {
    const auto state = native(backend).state();
    return state->operands().num_pending(state->group());
  });
}

}  // namespace shoal_torch
