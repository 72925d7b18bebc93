#include "fuzz_targets.h"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "check.h"

namespace fuzz_test {

using Bytes = std::vector<std::uint8_t>;

// Inputs that once failed (docs of the corpus: tests/fuzz/README.md).
TEST(fuzz_inputs_that_once_failed_are_read_or_refused) {
  int num_read = 0;
  for (const auto& entry : std::filesystem::directory_iterator(SHOAL_FUZZ_CORPUS)) {
    std::ifstream file(entry.path(), std::ios::binary);
    const Bytes data{std::istreambuf_iterator<char>(file), {}};
    fuzz::run(data.data(), data.size());
    ++num_read;
  }
  CHECK(num_read > 0);
}

TEST(fuzz_random_inputs_are_read_or_refused) {
  std::mt19937_64 random(1);
  for (int k = 0; k < 3000; ++k) {
    Bytes data(1 + random() % 600);
    for (std::uint8_t& each : data) each = static_cast<std::uint8_t>(random());
    data[0] = static_cast<std::uint8_t>(k % 5);
    fuzz::run(data.data(), data.size());
  }
}

}  // namespace fuzz_test
