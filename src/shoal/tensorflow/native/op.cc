// Collectives of a group as one asynchronous operation of TensorFlow.
//
// It has any number of inputs, and each output has the input of its index. Small tensors travel in one block. The kernel
// submits and returns, so that no thread of TensorFlow waits; the group's thread completes it. It is stateful, so that
// a tf.function runs the calls of a program in the order in which the user wrote them, as all ranks must.
//
// Built on first use by shoal/tensorflow/op.py, with the headers of the installed TensorFlow. Uses the engine through the
// C interface only (shoal.h).
#include <shoal.h>
#include <tree_call.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace {

namespace tf = tensorflow;
using tf::shape_inference::InferenceContext;
using tf::shape_inference::ShapeHandle;

struct ElementType {
  shoal_dtype dtype;
  std::uint64_t parts;  // elements of `dtype` in one of the tensor's
};

std::optional<ElementType> element_type(tf::DataType type) {
  switch (type) {
    case tf::DT_FLOAT: return ElementType{SHOAL_FLOAT32, 1};
    case tf::DT_DOUBLE: return ElementType{SHOAL_FLOAT64, 1};
    case tf::DT_HALF: return ElementType{SHOAL_FLOAT16, 1};
    case tf::DT_BFLOAT16: return ElementType{SHOAL_BFLOAT16, 1};
    case tf::DT_INT8: return ElementType{SHOAL_INT8, 1};
    case tf::DT_UINT8: return ElementType{SHOAL_UINT8, 1};
    case tf::DT_INT32: return ElementType{SHOAL_INT32, 1};
    case tf::DT_INT64: return ElementType{SHOAL_INT64, 1};
    case tf::DT_COMPLEX64: return ElementType{SHOAL_FLOAT32, 2};
    case tf::DT_COMPLEX128: return ElementType{SHOAL_FLOAT64, 2};
    default: return std::nullopt;
  }
}

bool in_place(std::int64_t kind) { return kind == SHOAL_ALL_REDUCE || kind == SHOAL_BROADCAST; }

shoal::GroupTable groups;

absl::Status infer_shapes(InferenceContext* context) {
  std::int64_t kind = 0, size = 1;
  TF_RETURN_IF_ERROR(context->GetAttr("kind", &kind));
  TF_RETURN_IF_ERROR(context->GetAttr("size", &size));
  for (int i = 0; i < context->num_inputs(); ++i) {
    ShapeHandle shape = context->input(i);
    if (kind == SHOAL_ALL_GATHER) {
      TF_RETURN_IF_ERROR(context->Concatenate(context->MakeShape({size}), shape, &shape));
    } else if (kind == SHOAL_REDUCE_SCATTER) {
      TF_RETURN_IF_ERROR(context->WithRankAtLeast(shape, 1, &shape));
      tf::shape_inference::DimensionHandle rows;
      TF_RETURN_IF_ERROR(context->Divide(context->Dim(shape, 0), size, /*evenly_divisible=*/true, &rows));
      TF_RETURN_IF_ERROR(context->ReplaceDim(shape, 0, rows, &shape));
    }
    context->set_output(i, shape);
  }
  return absl::OkStatus();
}

class Collective : public tf::AsyncOpKernel {
 public:
  explicit Collective(tf::OpKernelConstruction* context) : tf::AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("group", &group_));
    OP_REQUIRES_OK(context, context->GetAttr("kind", &kind_));
    OP_REQUIRES_OK(context, context->GetAttr("size", &size_));
    OP_REQUIRES_OK(context, context->GetAttr("reduction", &reduction_));
    OP_REQUIRES_OK(context, context->GetAttr("root", &root_));
    OP_REQUIRES_OK(context, context->GetAttr("timeout_s", &timeout_s_));
  }

  void ComputeAsync(tf::OpKernelContext* context, DoneCallback done) override {
    std::vector<shoal::Leaf> leaves;
    for (int i = 0; i < context->num_inputs(); ++i) {
      OP_REQUIRES_OK_ASYNC(context, add(context, i, leaves), done);
    }
    if (group_ == 0) {
      shoal::TreeCall::copy(leaves);
      done();
      return;
    }
    shoal_group* const group = groups.find(group_);
    OP_REQUIRES_ASYNC(context, group != nullptr,
                      absl::FailedPreconditionError("the group of this program is closed, or was not made in this "
                                                    "process; call shoal.tensorflow.init() before the program runs"),
                      done);
    shoal_operation operation{};
    operation.kind = static_cast<std::int32_t>(kind_);
    operation.reduction = static_cast<std::int32_t>(reduction_);
    operation.root = static_cast<std::int32_t>(root_);
    operation.timeout_s = timeout_s_;
    shoal::TreeCall::run(group, std::move(leaves), operation, [context, done](const std::string& error) {
      if (!error.empty()) context->SetStatus(absl::AbortedError(error));
      done();
    });
    shoal_group_release(group);
  }

 private:
  // Allocates output `i`, and appends its leaf. What nothing else uses is the output of its own input.
  absl::Status add(tf::OpKernelContext* context, int i, std::vector<shoal::Leaf>& leaves) {
    const tf::Tensor& input = context->input(i);
    const auto* const from = static_cast<const std::byte*>(input.data());
    const std::uint64_t bytes = input.TotalBytes();
    const bool reduces = kind_ == SHOAL_ALL_REDUCE || kind_ == SHOAL_REDUCE_SCATTER;
    // What is only moved is moved as bytes.
    if (!tf::DataTypeCanUseMemcpy(input.dtype())) {
      return absl::InvalidArgumentError("shoal.tensorflow: a tensor of dtype " + tf::DataTypeString(input.dtype()) +
                                        " cannot be sent");
    }
    const auto type = reduces ? element_type(input.dtype()) : std::optional(ElementType{SHOAL_UINT8, 0});
    if (!type) {
      return absl::InvalidArgumentError("shoal.tensorflow: a tensor of dtype " + tf::DataTypeString(input.dtype()) +
                                        " is not reduced over ranks; convert it, as to float32");
    }
    tf::TensorShape shape = input.shape();
    std::uint64_t count = reduces ? input.NumElements() * type->parts : bytes;
    if (kind_ == SHOAL_ALL_GATHER) shape.InsertDim(0, size_);
    if (kind_ == SHOAL_REDUCE_SCATTER) {
      if (shape.dims() == 0 || shape.dim_size(0) % size_ != 0) {
        return absl::InvalidArgumentError("shoal.tensorflow: reducescatter of a tensor of shape " +
                                          shape.DebugString() + "; its first dimension must be a multiple of the " +
                                          std::to_string(size_) + " ranks: pad it");
      }
      shape.set_dim(0, shape.dim_size(0) / size_);
      count /= static_cast<std::uint64_t>(size_);
    }
    tf::Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(in_place(kind_) ? context->forward_input_or_allocate_output({i}, i, shape, &output)
                                       : context->allocate_output(i, shape, &output));
    leaves.push_back({from, static_cast<std::byte*>(output->data()), type->dtype, count, bytes});
    return absl::OkStatus();
  }

  std::int64_t group_ = 0, kind_ = 0, size_ = 1, reduction_ = 0, root_ = 0;
  float timeout_s_ = 0;
};

REGISTER_OP("ShoalCollective")
    .Input("tensors: T")
    .Output("results: T")
    .Attr("T: list(type) >= 1")
    .Attr("group: int")
    .Attr("kind: int")
    .Attr("size: int")
    .Attr("reduction: int")
    .Attr("root: int")
    .Attr("timeout_s: float")
    .SetIsStateful()
    .SetShapeFn(infer_shapes);
REGISTER_KERNEL_BUILDER(Name("ShoalCollective").Device(tf::DEVICE_CPU), Collective);

}  // namespace

extern "C" {

// Takes over a reference to a group under a number above 0, in place of the one before.
SHOAL_API void shoal_tensorflow_set_group(std::int64_t number, shoal_group* group) { groups.set(number, group); }

}
