// The process group of backend "shoal" in C++: a c10d::Backend whose frequent collectives of contiguous CPU tensors go
// to the engine without Python and without the GIL. Everything else is passed to the ShoalProcessGroup beside it, which
// has the same engine, so that all operations have one sequence of numbers.
//
// Built on first use by shoal/comm/native_group.py. Uses the engine through the C interface only (shoal.h).
#include <shoal.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "group_state.h"
#include "plain_tensors.h"
#include "works.h"

namespace shoal_torch {
namespace {

// ---- the backend ----------------------------------------------------------------------------------------

class ShoalBackend final : public c10d::Backend {
 public:
  ShoalBackend(std::shared_ptr<GroupState> state, int rank, int size)
      : c10d::Backend(rank, size), state_(std::move(state)) {}

  const py::object& python() const { return state_->python(); }
  GroupState& state() { return *state_; }

  const std::string getBackendName() const override { return "shoal"; }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(getBackendName(), state_->timeout());
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

  // ---- collectives by messages: what is not plain, and what is wrong, goes to Python

  WorkPtr gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                 const c10d::GatherOptions& opts) override {
    const bool root = opts.rootRank == rank_, fits = is_plain(inputs) && outputs.size() == (root ? 1u : 0u);
    const auto blocks = fits && root ? blocks_of(outputs[0], size_, inputs[0].scalar_type()) : std::nullopt;
    if (!fits || blocks.has_value() != root) return delegate("gather", outputs, inputs, opts);
    return gather(blocks, inputs[0], root ? outputs[0] : std::vector<at::Tensor>{}, opts);
  }
  // torch 2.11 does not have it: an override from 2.12 on.
  WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) {
    const bool root = opts.rootRank == rank_;
    const bool fits = is_plain(input) && (!root || (is_plain(output) && has_rows(output, input)));
    if (!fits) return delegate("gather_into_tensor", output, input, opts);
    if (!root) return gather(std::nullopt, input, {}, opts);
    std::vector<shoal_block> rows;
    for (int rank = 0; rank < size_; ++rank) {
      rows.push_back({static_cast<char*>(output.data_ptr()) + rank * input.nbytes(), static_cast<std::uint64_t>(input.numel())});
    }
    return gather(rows, input, {output}, opts);
  }
  WorkPtr scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                  const c10d::ScatterOptions& opts) override {
    const bool root = opts.rootRank == rank_, fits = is_plain(outputs) && inputs.size() == (root ? 1u : 0u);
    const auto blocks = fits && root ? blocks_of(inputs[0], size_, outputs[0].scalar_type()) : std::nullopt;
    if (!fits || blocks.has_value() != root || (root && own(*blocks).count != static_cast<std::uint64_t>(outputs[0].numel()))) {
      return delegate("scatter", outputs, inputs, opts);
    }
    shoal_operation operation = operation_of(SHOAL_SCATTER, outputs[0], outputs[0]);
    operation.root = static_cast<std::int32_t>(opts.rootRank);
    operation.inputs = blocks ? blocks->data() : nullptr;
    return submit("scatter", c10d::OpType::SCATTER, operation, opts.timeout, at::Tensor(), outputs[0],
                  root ? inputs[0] : std::vector<at::Tensor>{});
  }
  WorkPtr alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                   const c10d::AllToAllOptions& opts) override {
    const auto type = inputs.empty() ? at::kFloat : inputs[0].scalar_type();
    const auto from = blocks_of(inputs, size_, type), to = blocks_of(outputs, size_, type);
    if (!from || !to || own(*from).count != own(*to).count) return delegate("alltoall", outputs, inputs, opts);
    std::vector<at::Tensor> all = inputs;
    all.insert(all.end(), outputs.begin(), outputs.end());
    return all_to_all(c10d::OpType::ALLTOALL, *from, *to, inputs[0], outputs, std::move(all), opts);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& opts) override {
    const bool same = input.scalar_type() == output.scalar_type() && !overlap(input, output);
    const auto from = same ? split_rows(input, input_sizes, size_) : std::nullopt;
    const auto to = same ? split_rows(output, output_sizes, size_) : std::nullopt;
    if (!from || !to || own(*from).count != own(*to).count) {
      return delegate("alltoall_base", output, input, output_sizes, input_sizes, opts);
    }
    return all_to_all(c10d::OpType::ALLTOALL_BASE, *from, *to, input, {output}, {input, output}, opts);
  }

  // ---- collectives that Python prepares

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
  // ---- messages, which have no number in the group's sequence

  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    if (!is_plain(tensors)) return ask("send", tensors, to, tag);
    return message("send", c10d::OpType::SEND, SHOAL_SEND, tensors[0], to, tag);
  }
  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    if (!is_plain(tensors)) return ask("recv", tensors, from, tag);
    return message("recv", c10d::OpType::RECV, SHOAL_RECV, tensors[0], from, tag);
  }
  WorkPtr recvAnysource(std::vector<at::Tensor>& tensors, int tag) override {
    if (!is_plain(tensors)) return ask("recv_anysource", tensors, tag);
    return message("recv", c10d::OpType::RECVANYSOURCE, SHOAL_RECV, tensors[0], -1, tag);
  }

  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override {
    const py::gil_scoped_acquire gil;
    python().attr("monitored_barrier")(state_->limit(opts.timeout), wait_all_ranks);
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

  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& opts) override;

  uint64_t getSequenceNumberForGroup() override {
    const py::gil_scoped_acquire gil;
    return state_->num_submitted() + python().attr("getSequenceNumberForGroup")().cast<uint64_t>();
  }
  void setSequenceNumberForGroup() override {}

  void setTimeout(Milliseconds timeout) override {
    state_->set_timeout(timeout);
    const py::gil_scoped_acquire gil;
    python().attr("set_timeout")(timeout);
  }

  void abort() override {
    const py::gil_scoped_acquire gil;
    python().attr("abort")();
  }
  void shutdown() override { state_->shutdown(); }

 private:
  bool has_rows(const at::Tensor& large, const at::Tensor& small) const {
    return large.scalar_type() == small.scalar_type() && large.numel() == size_ * small.numel();
  }

  const shoal_block& own(const std::vector<shoal_block>& blocks) const { return blocks[static_cast<std::size_t>(rank_)]; }

  WorkPtr submit(const char* name, c10d::OpType type, shoal_operation operation, Milliseconds timeout,
                 const at::Tensor& input, const at::Tensor& output, std::vector<at::Tensor> others = {}) {
    operation.timeout_s = state_->limit_s(timeout);
    const shoal_handle handle = state_->submit(name, operation, input, output, std::move(others));
    std::vector<at::Tensor> outputs;
    if (output.defined()) outputs.push_back(output);
    return coalesced(c10::make_intrusive<EngineWork>(state_, handle, type, name, std::move(outputs)));
  }

  // `blocks` on the root.
  WorkPtr gather(const std::optional<std::vector<shoal_block>>& blocks, const at::Tensor& input,
                 std::vector<at::Tensor> outputs, const c10d::GatherOptions& opts) {
    shoal_operation operation = operation_of(SHOAL_GATHER, input, input);
    operation.root = static_cast<std::int32_t>(opts.rootRank);
    operation.outputs = blocks ? blocks->data() : nullptr;
    operation.timeout_s = state_->limit_s(opts.timeout);
    const shoal_handle handle = state_->submit("gather", operation, input, at::Tensor(), outputs);
    return coalesced(c10::make_intrusive<EngineWork>(state_, handle, c10d::OpType::GATHER, "gather", std::move(outputs)));
  }

  WorkPtr all_to_all(c10d::OpType type, const std::vector<shoal_block>& from, const std::vector<shoal_block>& to,
                     const at::Tensor& input, std::vector<at::Tensor> outputs, std::vector<at::Tensor> all,
                     const c10d::AllToAllOptions& opts) {
    shoal_operation operation = operation_of(SHOAL_ALL_TO_ALL, input, input);
    operation.count = 0;
    for (const shoal_block& each : from) operation.count += each.count;
    operation.inputs = from.data();
    operation.outputs = to.data();
    operation.timeout_s = state_->limit_s(opts.timeout);
    const shoal_handle handle = state_->submit("all_to_all", operation, at::Tensor(), at::Tensor(), std::move(all));
    return coalesced(c10::make_intrusive<EngineWork>(state_, handle, type, "all_to_all", std::move(outputs)));
  }

  WorkPtr message(const char* name, c10d::OpType type, shoal_kind kind, const at::Tensor& tensor, int peer, int tag) {
    shoal_operation operation = operation_of(kind, tensor, tensor);
    const at::Tensor source = at::full({1}, -1, at::kInt);
    operation.root = peer;
    operation.tag = tag;
    operation.source = source.data_ptr<int>();
    operation.timeout_s = state_->limit_s(c10d::kUnsetTimeout);
    const shoal_handle handle = state_->submit_message(name, operation, tensor, source);
    return coalesced(c10::make_intrusive<MessageWork>(state_, handle, type, name, std::vector<at::Tensor>{tensor}, source));
  }

  // Calls a method of the Python group that begins a collective.
  template <class... Args>
  WorkPtr delegate(const char* method, const Args&... args) {
    state_->begin(method, [] {});
    return ask(method, args...);
  }

  // Calls a method of the Python group that returns a work.
  template <class... Args>
  WorkPtr ask(const char* method, const Args&... args) {
    const py::gil_scoped_acquire gil;
    return coalesced(c10::make_intrusive<PythonWork>(python().attr(method)(args...)));
  }

  WorkPtr coalesced(WorkPtr work) {
    const std::lock_guard lock(coalescing_mutex_);
    if (coalescing_) coalescing_->push_back(work);
    return work;
  }

  const std::shared_ptr<GroupState> state_;
  std::mutex coalescing_mutex_;
  std::optional<std::vector<WorkPtr>> coalescing_;
};

// The groups of the process, for `end`.
std::mutex all_mutex;
std::vector<std::weak_ptr<GroupState>> all_groups;

// Lets no callback run after this, when the interpreter ends.
void end() {
  const py::gil_scoped_release released;
  std::vector<std::weak_ptr<GroupState>> groups;
  {
    const std::lock_guard lock(all_mutex);
    groups.swap(all_groups);
  }
  for (const auto& each : groups) {
    if (const auto group = each.lock()) group->end();
  }
}

// Makes the backend of a ShoalProcessGroup. `group` is the address of a reference to its engine's C group, which the
// backend takes over; 0 for a group of one rank.
c10::intrusive_ptr<c10d::Backend> create(py::object python, py::object idle, std::uintptr_t group, int rank, int size,
                                         Milliseconds timeout, bool ordered) {
  CGroup owned(reinterpret_cast<shoal_group*>(group));
  if (!owned) {
    shoal_group_options options{};
    options.struct_size = sizeof options;
    options.size = 1;
    shoal_group* made = nullptr;
    const shoal_status status = shoal_group_create(&options, &made);
    if (status != SHOAL_SUCCESS) raise_status(status, shoal_last_error());
    owned.reset(made);
  }
  auto state = std::make_shared<GroupState>(std::move(python), std::move(idle), std::move(owned), timeout, ordered);
  {
    const std::lock_guard lock(all_mutex);
    std::erase_if(all_groups, [](const auto& each) { return each.expired(); });
    all_groups.push_back(state);
  }
  return c10::make_intrusive<ShoalBackend>(std::move(state), rank, size);
}

c10::intrusive_ptr<c10d::Backend> ShoalBackend::split(const c10::intrusive_ptr<c10d::Store>&,
                                                      const std::vector<int>& ranks,
                                                      const c10::intrusive_ptr<Options>& opts) {
  const py::gil_scoped_acquire gil;
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
  module.def("end", &end);
  module.def("is_native", [](const c10::intrusive_ptr<c10d::Backend>& backend) {
    return dynamic_cast<ShoalBackend*>(backend.get()) != nullptr;
  });
  module.def("python_group", [](const c10::intrusive_ptr<c10d::Backend>& backend) { return native(backend).python(); });
  module.def("num_pending", [](const c10::intrusive_ptr<c10d::Backend>& backend) {
    GroupState& state = native(backend).state();
    return state.operands().num_pending(state.group());
  });
  // Of a group of one rank, whose operations the Python group's engine does not see; empty for others.
  module.def("own_counters", [](const c10::intrusive_ptr<c10d::Backend>& backend) {
    std::map<std::string, std::uint64_t> counts;
    const auto add = [](void* context, const char* name, uint64_t value) {
      (*static_cast<std::map<std::string, std::uint64_t>*>(context))[name] = value;
    };
    GroupState& state = native(backend).state();
    if (state.is_single()) shoal_group_counters(state.group(), add, &counts);
    return counts;
  });
  module.def("num_submitted",
             [](const c10::intrusive_ptr<c10d::Backend>& backend) { return native(backend).state().num_submitted(); });
}

}  // namespace shoal_torch
