// Collectives of a group as one asynchronous call of XLA's foreign function interface (FFI).
//
// A call has any number of operands, the leaves of a pytree, and each result has the operand of its index. Small leaves
// travel in one block. The handler submits and returns; XLA goes on when the group has completed all of it. Python
// (shoal.jax.ffi) orders the calls by a token, the first operand and the first result, so that all ranks submit in the
// order of the program.
//
// Built on first use by shoal/jax/ffi.py, with the headers of the installed jaxlib. Uses the engine through the C
// interface only (shoal.h).
#include <shoal.h>
#include <xla/ffi/api/ffi.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

namespace ffi = xla::ffi;

// Leaves below this share a block: a message of their own costs more than two copies.
constexpr std::uint64_t fused_below_bytes = 64 << 10;

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

std::uint64_t bytes_of(shoal_dtype dtype) {
  constexpr std::array<std::uint64_t, 8> bytes = {4, 8, 2, 2, 1, 1, 4, 8};
  return bytes[dtype];
}

bool reduces(int kind) { return kind == SHOAL_ALL_REDUCE || kind == SHOAL_REDUCE_SCATTER; }

// Groups by the number that a compiled program has as an attribute; an address would not outlive the process.
std::mutex groups_mutex;
std::map<std::int64_t, shoal_group*> groups;

struct Leaf {
  const std::byte* input;
  std::byte* output;
  shoal_dtype dtype;
  std::uint64_t count;  // of the operation
  std::uint64_t input_bytes;
};

// Small leaves of one dtype, side by side.
struct Block {
  std::unique_ptr<std::byte[]> memory;
  std::vector<Leaf> leaves;
  std::uint64_t count = 0;
};

struct Call {
  std::atomic<std::size_t> pending{1};  // operations, and the handler while it submits
  std::mutex mutex;
  std::string error;
  ffi::Promise promise;
  std::vector<Block> blocks;

  void fail(const char* message) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (error.empty()) error = message;
  }

  // Ends one operation. The last one completes the call and deletes it.
  void end() {
    if (pending.fetch_sub(1) != 1) return;
    const std::unique_ptr<Call> self(this);
    if (!error.empty()) {
      promise.SetError(ffi::Error(ffi::ErrorCode::kAborted, error));
      return;
    }
    for (const Block& block : blocks) {
      const std::byte* from = block.memory.get();
      for (const Leaf& leaf : block.leaves) {
        std::memcpy(leaf.output, from, leaf.input_bytes);
        from += leaf.input_bytes;
      }
    }
    promise.SetAvailable();
  }
};

void on_complete(void* context, shoal_handle, shoal_status status, const char* message) {
  auto* call = static_cast<Call*>(context);
  if (status != SHOAL_SUCCESS) call->fail(message);
  call->end();
}

ffi::Error invalid(const std::string& message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "shoal.jax: " + message);
}

// Reads the operands and results of a call.
ffi::ErrorOr<std::vector<Leaf>> leaves_of(ffi::RemainingArgs& args, ffi::RemainingRets& rets, int kind,
                                          int reduction) {
  std::vector<Leaf> leaves;
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

// Copies small leaves into blocks, one per dtype, and removes them from `leaves`.
std::vector<Block> fuse(std::vector<Leaf>& leaves) {
  std::map<shoal_dtype, std::vector<Leaf>> small;
  for (const Leaf& leaf : leaves) {
    if (leaf.input_bytes < fused_below_bytes) small[leaf.dtype].push_back(leaf);
  }
  std::vector<Block> blocks;
  for (auto& [dtype, group] : small) {
    if (group.size() < 2) continue;
    Block block;
    std::uint64_t bytes = 0;
    for (const Leaf& leaf : group) bytes += leaf.input_bytes;
    block.memory = std::make_unique_for_overwrite<std::byte[]>(bytes);
    std::byte* to = block.memory.get();
    for (const Leaf& leaf : group) {
      if (leaf.input_bytes) std::memcpy(to, leaf.input, leaf.input_bytes);
      to += leaf.input_bytes;
    }
    block.count = bytes / bytes_of(dtype);
    block.leaves = std::move(group);
    std::erase_if(leaves, [&](const Leaf& leaf) {
      return leaf.dtype == dtype && leaf.input_bytes < fused_below_bytes;
    });
    blocks.push_back(std::move(block));
  }
  return blocks;
}

// A group of one rank: every operation is a copy.
void copy_all(const std::vector<Leaf>& leaves) {
  for (const Leaf& leaf : leaves) {
    if (leaf.input != leaf.output && leaf.input_bytes) std::memcpy(leaf.output, leaf.input, leaf.input_bytes);
  }
}

// Submits a call's operations together; each of them ends the call by on_complete, or this does.
void submit(shoal_group* group, Call* call, const std::vector<Leaf>& leaves, shoal_operation operation) {
  std::vector<shoal_operation> operations;
  const auto add = [&](shoal_dtype dtype, std::uint64_t count, const void* input, void* output) {
    operation.dtype = dtype;
    operation.count = count;
    operation.input = input;
    operation.output = output;
    operations.push_back(operation);
  };
  for (const Block& block : call->blocks) {
    add(block.leaves.front().dtype, block.count, block.memory.get(), block.memory.get());
  }
  for (const Leaf& leaf : leaves) add(leaf.dtype, leaf.count, leaf.input, leaf.output);
  if (operations.empty()) return;
  std::vector<shoal_handle> handles(operations.size(), SHOAL_NO_HANDLE);
  call->pending += operations.size();
  if (shoal_submit(group, operations.data(), operations.size(), handles.data()) == SHOAL_SUCCESS) return;
  call->fail(shoal_last_error());
  for (const shoal_handle handle : handles) {
    if (handle == SHOAL_NO_HANDLE) call->end();
  }
}

ffi::Future collective(ffi::RemainingArgs args, ffi::RemainingRets rets, std::int64_t group_number, std::int64_t kind,
                       std::int64_t reduction, std::int64_t root, double timeout_s) {
  auto call = std::make_unique<Call>();
  ffi::Future future(call->promise);
  auto leaves = leaves_of(args, rets, static_cast<int>(kind), static_cast<int>(reduction));
  if (!leaves) {
    call->promise.SetError(leaves.error());
    return future;
  }
  if (group_number == 0) {
    copy_all(*leaves);
    call->promise.SetAvailable();
    return future;
  }
  shoal_group* group = nullptr;
  {
    const std::lock_guard<std::mutex> lock(groups_mutex);
    const auto found = groups.find(group_number);
    if (found != groups.end()) group = shoal_group_retain(found->second);
  }
  if (group == nullptr) {
    call->promise.SetError(invalid("the group of this program is closed, or was not made in this process; call "
                                   "shoal.jax.init() before the program runs"));
    return future;
  }
  if (kind == SHOAL_ALL_REDUCE || kind == SHOAL_BROADCAST) call->blocks = fuse(*leaves);
  shoal_operation operation{};
  operation.struct_size = sizeof operation;
  operation.kind = static_cast<std::int32_t>(kind);
  operation.reduction = static_cast<std::int32_t>(reduction);
  operation.root = static_cast<std::int32_t>(root);
  operation.timeout_s = timeout_s;
  operation.on_complete = on_complete;
  Call* const owned = call.release();
  operation.context = owned;
  submit(group, owned, *leaves, operation);
  owned->end();
  shoal_group_release(group);
  return future;
}

}  // namespace

extern "C" SHOAL_API XLA_FFI_Error* shoal_jax_collective(XLA_FFI_CallFrame* call_frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(shoal_jax_collective, collective,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::int64_t>("group")
                                  .Attr<std::int64_t>("kind")
                                  .Attr<std::int64_t>("reduction")
                                  .Attr<std::int64_t>("root")
                                  .Attr<double>("timeout_s"));

extern "C" {

// Takes over a reference to a group under a number above 0, in place of the one before.
SHOAL_API void shoal_jax_set_group(std::int64_t number, shoal_group* group) {
  const std::lock_guard<std::mutex> lock(groups_mutex);
  shoal_group*& place = groups[number];
  shoal_group* const before = std::exchange(place, group);
  if (group == nullptr) groups.erase(number);
  shoal_group_release(before);
}

}
