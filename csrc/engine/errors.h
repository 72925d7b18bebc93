// Errors of a group. Code on the network thread throws ProtocolError and GroupFailure; Engine catches both at the
// border of that thread and turns them into the group's failure. Callers see GroupError only.
#pragma once

#include <stdexcept>
#include <string>

namespace shoal {

// The group has failed. The message is meant for users.
class GroupError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A callback submits an operation after the program has submitted others: ranks may do so in different orders.
class OrderError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A peer sent a frame that no correct peer sends.
struct ProtocolError : std::runtime_error {
  ProtocolError(int from, const std::string& what) : std::runtime_error(what), peer(from) {}
  int peer;
};

// The group cannot continue: the cause, for all ranks.
struct GroupFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace shoal
