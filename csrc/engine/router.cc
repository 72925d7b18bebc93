#include "engine/router.h"

namespace shoal {

int Router::route(std::uint64_t seq, std::uint64_t index, int server) const {
  if (!is_lost(server)) return server;
  const int stand_in = topology_.stand_in(seq, index, lost_, workers_serve_);
  if (stand_in < 0) {
    throw GroupFailure("no server is left: " + members_.name_of(server) + " was lost, and workers do not serve");
  }
  return stand_in;
}

bool Router::lose(int server) {
  if (!members_.is_helper(server) || server >= members_.num_servers() || is_lost(server)) return false;
  lost_[static_cast<std::size_t>(server - members_.size())] = true;
  return true;
}

}  // namespace shoal
