// Tensors as the engine takes them: contiguous memory of a type that it knows, as operations and blocks of shoal.h.
#pragma once

#include <ATen/ATen.h>
#include <shoal.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <optional>
#include <utility>
#include <vector>

namespace shoal_torch {

inline std::optional<shoal_dtype> dtype_of(const at::Tensor& tensor) {
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
inline bool is_plain(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() && !tensor.is_neg() &&
         dtype_of(tensor).has_value();
}

inline bool is_plain(const std::vector<at::Tensor>& tensors) { return tensors.size() == 1 && is_plain(tensors[0]); }

// Returns the engine's reduction of a tensor if it needs no step before or after it.
inline std::optional<shoal_reduction> reduction_of(const c10d::ReduceOp& op, const at::Tensor& tensor) {
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

inline bool overlap(const at::Tensor& one, const at::Tensor& other) {
  const auto* a = static_cast<const char*>(one.const_data_ptr());
  const auto* b = static_cast<const char*>(other.const_data_ptr());
  return a < b + other.nbytes() && b < a + one.nbytes();
}

inline shoal_operation operation_of(shoal_kind kind, const at::Tensor& input, const at::Tensor& output) {
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

// The memory of tensors of one type that the engine takes as the blocks of ranks; nothing if they are not.
inline std::optional<std::vector<shoal_block>> blocks_of(const std::vector<at::Tensor>& tensors, int size, at::ScalarType type) {
  if (static_cast<int>(tensors.size()) != size) return std::nullopt;
  std::vector<shoal_block> blocks;
  for (const at::Tensor& each : tensors) {
    if (!is_plain(each) || each.scalar_type() != type) return std::nullopt;
    blocks.push_back({each.data_ptr(), static_cast<std::uint64_t>(each.numel())});
  }
  return blocks;
}

// The blocks of a tensor that is split along its first dimension; nothing if the sizes do not add up to it.
inline std::optional<std::vector<shoal_block>> split_rows(const at::Tensor& tensor, const std::vector<int64_t>& sizes, int size) {
  if (!is_plain(tensor) || tensor.dim() == 0) return std::nullopt;
  const int64_t rows = tensor.size(0), width = rows ? tensor.numel() / rows : 0;
  if (sizes.empty() ? rows % size != 0 : static_cast<int>(sizes.size()) != size) return std::nullopt;
  std::vector<shoal_block> blocks;
  int64_t begin = 0;
  for (int rank = 0; rank < size; ++rank) {
    const int64_t count = sizes.empty() ? rows / size : sizes[static_cast<std::size_t>(rank)];
    if (count < 0 || count > rows - begin) return std::nullopt;
    char* data = static_cast<char*>(tensor.data_ptr()) + begin * width * static_cast<int64_t>(tensor.element_size());
    blocks.push_back({data, static_cast<std::uint64_t>(count * width)});
    begin += count;
  }
  return begin == rows ? std::optional(std::move(blocks)) : std::nullopt;
}

}  // namespace shoal_torch
