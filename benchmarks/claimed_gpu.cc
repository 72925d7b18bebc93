// Lets autograd's engine follow tensors that claim to be on a GPU on a machine that has none.
//
// Before a backward pass, torch of a CUDA build asks the driver whether each GPU has a context. Preloaded,
// this answers that none has; all else is torch's own answer of a machine without a GPU.

#include <ATen/detail/CUDAHooksInterface.h>

namespace {

struct NoContext final : at::CUDAHooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return false; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
};

}  // namespace

namespace at::detail {

const CUDAHooksInterface& getCUDAHooks() {
  static const auto* hooks = new NoContext;
  return *hooks;
}

}  // namespace at::detail
