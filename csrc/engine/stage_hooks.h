// Calls from the reduction inside a host to the engine, on the thread that advances it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "engine/op_table.h"

namespace shoal {

struct StageHooks {
  // Sends the host's contribution to a chunk; the result goes to `destination`.
  std::function<void(const OpPtr&, std::uint64_t index, const std::byte* data, Element input, std::byte* destination)>
      push;
  std::function<void(const OpPtr&, std::uint64_t index, std::byte* destination)> expect;
  std::function<void(const OpPtr&)> done;  // this rank has nothing more to do for the operation
  // Local rank `rank` (numbered in the group) has issued another operation.
  std::function<void(std::uint64_t seq, int rank, std::uint64_t signature)> report_mismatch;
  // The block that rank `rank` sends has another size than the `expected` bytes.
  std::function<void(const OpPtr&, int rank, std::size_t bytes, std::size_t expected)> report_misfit;
  std::function<void(const std::string& what)> error;  // the stage has failed
  std::function<void(const char* what, std::uint64_t begin_ns, std::uint64_t seq, std::uint64_t chunk)> trace;
};

}  // namespace shoal
