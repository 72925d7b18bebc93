// Collectives of a group as one call of XLA's foreign function interface (FFI), on CPUs and on CUDA devices.
//
// A call has any number of operands, the leaves of a pytree, and each result has the operand of its index. Python
// (shoal.jax.ffi) orders the calls by a token, the first operand and the first result, so that all ranks submit in the
// order of the program.
//
// Small leaves travel in one block. On CPUs the handler submits and returns; XLA goes on when the group has completed all of
// it. On a CUDA device the handler is work of XLA's stream: it returns once the results are on their way to the device,
// since only a handler that has not returned can fail a program.
//
// Built on first use by shoal/jax/ffi.py, with the headers of the installed jaxlib. Uses the engine through the C
// interface only (shoal.h).
#include <shoal.h>
#include <link.h>
#include <tree_call.h>
#include <xla/ffi/api/ffi.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

namespace ffi = xla::ffi;

struct ElementType {
  shoal_dtype dtype;
  std::uint64_t parts;  // elements of `dtype` in one of the array's
  bool sums;            // whether a sum of `dtype` is one of the array's type
  bool orders;          // whether min, max and prod are, too
};

std::optional<ElementType> element_type(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32: return ElementType{SHOAL_FLOAT32, 1, true, true};
    case ffi::DataType::F64: return ElementType{SHOAL_FLOAT64, 1, true, true};
    case ffi::DataType::F16: return ElementType{SHOAL_FLOAT16, 1, true, true};
    case ffi::DataType::BF16: return ElementType{SHOAL_BFLOAT16, 1, true, true};
    case ffi::DataType::S8: return ElementType{SHOAL_INT8, 1, true, true};
    case ffi::DataType::U8: return ElementType{SHOAL_UINT8, 1, true, true};
    case ffi::DataType::S32: return ElementType{SHOAL_INT32, 1, true, true};
    case ffi::DataType::S64: return ElementType{SHOAL_INT64, 1, true, true};
    case ffi::DataType::U32: return ElementType{SHOAL_INT32, 1, true, false};
    case ffi::DataType::U64: return ElementType{SHOAL_INT64, 1, true, false};
    case ffi::DataType::C64: return ElementType{SHOAL_FLOAT32, 2, true, false};
    case ffi::DataType::C128: return ElementType{SHOAL_FLOAT64, 2, true, false};
    case ffi::DataType::PRED: return ElementType{SHOAL_UINT8, 1, false, true};
    case ffi::DataType::S16:
    case ffi::DataType::U16: return ElementType{SHOAL_UINT8, 2, false, false};
    default: return std::nullopt;
  }
}

bool reduces(int kind) { return kind == SHOAL_ALL_REDUCE || kind == SHOAL_REDUCE_SCATTER; }

shoal::GroupTable groups;

ffi::Error invalid(const std::string& message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "shoal.jax: " + message);
}

// Reads the operands and results of a call.
ffi::ErrorOr<std::vector<shoal::Leaf>> leaves_of(ffi::RemainingArgs& args, ffi::RemainingRets& rets, int kind,
                                                 int reduction) {
  std::vector<shoal::Leaf> leaves;
  for (std::size_t i = 0; i < args.size(); ++i) {
    auto input = args.get<ffi::AnyBuffer>(i);
    auto output = rets.get<ffi::AnyBuffer>(i);
    if (!input) return ffi::Unexpected(input.error());
    if (!output) return ffi::Unexpected(output.error());
    if (input->element_type() == ffi::DataType::TOKEN) continue;
    const auto type = element_type(input->element_type());
    const bool sums = reduction == SHOAL_SUM || reduction == SHOAL_AVG;
    if (!type || (reduces(kind) && !(sums ? type->sums : type->orders))) {
      return ffi::Unexpected(invalid("operand " + std::to_string(i) +
                                     " has a dtype that this operation does not support; convert it"));
    }
    const std::size_t elements = kind == SHOAL_REDUCE_SCATTER ? (*output)->element_count() : input->element_count();
    leaves.push_back({static_cast<const std::byte*>(input->untyped_data()),
                      static_cast<std::byte*>((*output)->untyped_data()), type->dtype, elements * type->parts,
                      input->size_bytes()});
  }
  return leaves;
}

ffi::Error no_group() {
  return invalid("the group of this program is closed, or was not made in this process; call shoal.jax.init() before the "
                 "program runs");
}

shoal_operation operation_of(std::int64_t kind, std::int64_t reduction, std::int64_t root, double timeout_s) {
  shoal_operation operation{};
  operation.struct_size = sizeof operation;
  operation.kind = static_cast<std::int32_t>(kind);
  operation.reduction = static_cast<std::int32_t>(reduction);
  operation.root = static_cast<std::int32_t>(root);
  operation.timeout_s = timeout_s;
  return operation;
}

// ---- CPUs -----------------------------------------------------------------------------------------------

ffi::Future collective(ffi::RemainingArgs args, ffi::RemainingRets rets, std::int64_t group_number, std::int64_t kind,
                       std::int64_t reduction, std::int64_t root, double timeout_s) {
  auto promise = std::make_shared<ffi::Promise>();
  ffi::Future future(*promise);
  auto leaves = leaves_of(args, rets, static_cast<int>(kind), static_cast<int>(reduction));
  if (!leaves) {
    promise->SetError(leaves.error());
    return future;
  }
  if (group_number == 0) {
    shoal::TreeCall::copy(*leaves);
    promise->SetAvailable();
    return future;
  }
  shoal_group* const group = groups.find(group_number);
  if (group == nullptr) {
    promise->SetError(no_group());
    return future;
  }
  shoal::TreeCall::run(group, std::move(*leaves), operation_of(kind, reduction, root, timeout_s),
                       [promise](const std::string& error) {
    if (error.empty()) {
      promise->SetAvailable();
    } else {
      promise->SetError(ffi::Error(ffi::ErrorCode::kAborted, error));
    }
  });
  shoal_group_release(group);
  return future;
}

// ---- CUDA devices ---------------------------------------------------------------------------------------

using Stream = struct OpaqueStream*;  // cudaStream_t
using Lane = std::shared_ptr<shoal_lane>;

// Returns the path of CUDA's runtime library in this process, "" without one. JAX's plugin loads it for each version of
// CUDA that is installed; the lowest one fits the driver if any does.
std::string loaded_runtime() {
  std::string found;
  const auto visit = [](dl_phdr_info* info, std::size_t, void* context) {
    auto& lowest = *static_cast<std::string*>(context);
    const std::string path = info->dlpi_name;
    const auto name = [](const std::string& of) { return of.substr(of.rfind('/') + 1); };
    if (name(path).rfind("libcudart.so.", 0) == 0 && (lowest.empty() || name(path) < name(lowest))) lowest = path;
    return 0;
  };
  dl_iterate_phdr(visit, &found);
  return found;
}

// The lanes of this process's devices, made when they are first used.
class LaneTable {
 public:
  // Returns null if there is none and none can be made; shoal_last_error() tells why.
  Lane find(std::int32_t device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Lane& lane = lanes_[device];
    if (!lane) {
      const std::string runtime = loaded_runtime();
      shoal_lane_options options{};
      options.struct_size = sizeof options;
      options.runtime = runtime.empty() ? "libcudart.so" : runtime.c_str();
      options.device = device;
      shoal_lane* made = nullptr;
      if (shoal_lane_create(&options, &made) == SHOAL_SUCCESS) lane = Lane(made, shoal_lane_release);
    }
    return lane;
  }
  void clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    lanes_.clear();
  }

 private:
  std::mutex mutex_;
  std::map<std::int32_t, Lane> lanes_;
};

LaneTable& lanes() {
  static auto* const table = new LaneTable;  // its threads may run until the process ends
  return *table;
}

// The operations of a call: copies of small leaves into blocks of one dtype, collectives, and copies out of the blocks.
struct DeviceCall {
  std::vector<shoal_operation> in, across, out;
};

// Returns none if the device has no memory for the blocks, which lives as long as `scratch`.
std::optional<DeviceCall> device_call(const std::vector<shoal::Leaf>& leaves, const shoal_operation& operation,
                                      ffi::ScratchAllocator& scratch) {
  const auto on = [&](shoal_dtype dtype, std::uint64_t count, const void* input, void* output) {
    shoal_operation made = operation;
    made.dtype = dtype;
    made.count = count;
    made.input = input;
    made.output = output;
    return made;
  };
  const shoal::Division division = shoal::divide(leaves, operation.kind);
  DeviceCall call;
  for (const std::vector<shoal::Leaf>& together : division.together) {
    const std::uint64_t bytes = shoal::bytes_of(together);
    const shoal_dtype dtype = together.front().dtype;
    const std::optional<void*> memory = scratch.Allocate(bytes);
    if (!memory) return std::nullopt;
    auto* to = static_cast<std::byte*>(*memory);
    call.across.push_back(on(dtype, bytes / shoal::bytes_of(dtype), to, to));
    for (const shoal::Leaf& leaf : together) {
      call.in.push_back(on(SHOAL_UINT8, leaf.input_bytes, leaf.input, to));
      call.out.push_back(on(SHOAL_UINT8, leaf.input_bytes, to, leaf.output));
      to += leaf.input_bytes;
    }
  }
  for (const shoal::Leaf& leaf : division.alone) {
    call.across.push_back(on(leaf.dtype, leaf.count, leaf.input, leaf.output));
  }
  return call;
}

ffi::Error device_collective(Stream stream, std::int32_t device, ffi::ScratchAllocator scratch, ffi::RemainingArgs args,
                             ffi::RemainingRets rets, std::int64_t group_number, std::int64_t kind,
                             std::int64_t reduction, std::int64_t root, double timeout_s) {
  const auto leaves = leaves_of(args, rets, static_cast<int>(kind), static_cast<int>(reduction));
  if (!leaves) return leaves.error();
  // A process alone has no group.
  const std::unique_ptr<shoal_group, decltype(&shoal_group_release)> group(
      group_number ? groups.find(group_number) : nullptr, shoal_group_release);
  if (group_number && !group) return no_group();
  const std::optional<DeviceCall> call = device_call(*leaves, operation_of(kind, reduction, root, timeout_s), scratch);
  if (!call) return ffi::Error(ffi::ErrorCode::kResourceExhausted, "shoal.jax: the device has no memory for a copy of small arrays");
  const Lane lane = lanes().find(device);
  shoal_status status = lane ? SHOAL_SUCCESS : SHOAL_SYSTEM_ERROR;
  const auto run = [&](shoal_group* in, const std::vector<shoal_operation>& operations) {
    if (status == SHOAL_SUCCESS) status = shoal_lane_run(lane.get(), in, operations.data(), operations.size(), stream);
  };
  run(nullptr, call->in);
  run(group.get(), call->across);
  run(nullptr, call->out);
  if (status == SHOAL_SUCCESS) return ffi::Error::Success();
  const std::string problem = shoal_last_error();
  if (status == SHOAL_SYSTEM_ERROR && group) shoal_group_abort(group.get(), problem.c_str());  // others wait for this rank
  return ffi::Error(ffi::ErrorCode::kAborted, problem);
}

// Returns `binding` with what both handlers take: arrays and the operation.
template <typename Binding>
auto collective_of(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<std::int64_t>("group")
      .template Attr<std::int64_t>("kind")
      .template Attr<std::int64_t>("reduction")
      .template Attr<std::int64_t>("root")
      .template Attr<double>("timeout_s");
}

}  // namespace

extern "C" SHOAL_API XLA_FFI_Error* shoal_jax_collective(XLA_FFI_CallFrame* call_frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(shoal_jax_collective, collective, collective_of(ffi::Ffi::Bind()));

extern "C" SHOAL_API XLA_FFI_Error* shoal_jax_device_collective(XLA_FFI_CallFrame* call_frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(shoal_jax_device_collective, device_collective,
                              collective_of(ffi::Ffi::Bind()
                                                .Ctx<ffi::PlatformStream<Stream>>()
                                                .Ctx<ffi::DeviceOrdinal>()
                                                .Ctx<ffi::ScratchAllocator>()));

extern "C" {

// Takes over a reference to a group under a number above 0, in place of the one before. Lanes keep groups: they end with
// the last use of a group.
SHOAL_API void shoal_jax_set_group(std::int64_t number, shoal_group* group) {
  if (group == nullptr) lanes().clear();
  groups.set(number, group);
}

}
