// Operations for tests of the outboxes.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "engine/op_table.h"

namespace made {

constexpr int kMe = 0, kOther = 1;
constexpr std::size_t kBytes = 10;  // of each chunk

inline shoal::OpPtr operation(std::uint64_t seq, std::size_t num_chunks, int server = kOther) {
  const auto op = std::make_shared<shoal::Op>();
  op->seq = seq;
  op->parts.resize(num_chunks);
  for (auto& part : op->parts) {
    part.server = server;
    part.contribution = {nullptr, kBytes};
  }
  return op;
}

using Sent = std::vector<std::pair<std::uint64_t, std::uint64_t>>;  // operations and chunks

template <typename Outbox>
Sent sent(Outbox& outbox, std::size_t window) {
  Sent out;
  while (const auto next = outbox.next(window, kMe)) out.emplace_back(next->first->seq, next->second);
  return out;
}

}  // namespace made
