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
#include <tree_call.h>
#include <xla/ffi/api/ffi.h>

#include <cstdint>
#include <memory>
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
    promise->SetError(invalid("the group of this program is closed, or was not made in this process; call "
                              "shoal.jax.init() before the program runs"));
    return future;
  }
  shoal_operation operation{};
  operation.kind = static_cast<std::int32_t>(kind);
  operation.reduction = static_cast<std::int32_t>(reduction);
  operation.root = static_cast<std::int32_t>(root);
  operation.timeout_s = timeout_s;
  shoal::TreeCall::run(group, std::move(*leaves), operation, [promise](const std::string& error) {
    if (error.empty()) {
      promise->SetAvailable();
    } else {
      promise->SetError(ffi::Error(ffi::ErrorCode::kAborted, error));
    }
  });
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
SHOAL_API void shoal_jax_set_group(std::int64_t number, shoal_group* group) { groups.set(number, group); }

}
