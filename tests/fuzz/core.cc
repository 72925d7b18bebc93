// libFuzzer's entry to the targets of the C++ core (tests/core/fuzz_targets.h).
#include "fuzz_targets.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::run(data, size);
  return 0;
}
