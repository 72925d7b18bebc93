// Operations for tests of what waits to be sent.
#pragma once

#include <memory>

#include "engine/op.h"

namespace made {

constexpr int kMe = 0, kOther = 1;
constexpr std::size_t kBytes = 10;  // of each chunk

inline shoal::OpPtr operation(std::uint64_t seq, std::size_t num_chunks, int server = kOther) {
  const auto op = std::make_shared<shoal::Op>();
  op->seq = seq;
  op->parts.resize(num_chunks);
  for (auto& part : op->parts) {
    part.server = server;
    part.contribution.size = kBytes;
  }
  return op;
}

}  // namespace made
