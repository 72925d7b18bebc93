// Names of processes and of groups' members, as they go over the wire.
#pragma once

#include <cstdint>
#include <deque>
#include <set>
#include <string>

#include "transport/transport.h"

namespace shoal {

inline constexpr std::size_t kMaxGroupName = 128;

// The place where a process listens. A helper has no process id: callers know only its address.
struct Place {
  std::string address;
  int port = 0;
  int pid = -1;

  bool is_helper() const { return pid < 0; }
  // "10.0.0.4:4100 pid 812"; a helper's: "10.0.1.7:4000". The name by which the process introduces itself.
  std::string name() const;
};

inline constexpr std::size_t kMaxDataConnections = 64;  // of a process to another one, for each of its addresses

// The connections that a process has opened to this one. Its name is a claim, which every member of a job can make: so all
// of them come from one address, or from those in the name, and they are no more than a process opens.
class Arrivals {
 public:
  // Returns why this connection is none of the process's, or an empty string.
  std::string add(const Introduction& who);
  bool any() const { return count_ > 0; }

 private:
  std::string first_;  // address
  std::size_t count_ = 0;
};

// A member's claim when it joins a group.
struct Identity {
  std::string group;
  int rank = 0;
  int size = 0;
  int host = 0;       // index of the rank's host
  int num_hosts = 1;  // of the group
};

// The group's number in frame headers. Two names may have the same number, which those who join are told.
std::uint32_t group_number(const std::string& group);

// Payload of a `join` frame. read_join throws std::runtime_error for a malformed one.
Payload join_payload(const Identity& who);
Identity read_join(const FrameHeader& header, const Payload& payload);

// Numbers of the groups that a process has left last: frames of theirs may still be on their way.
class LeftGroups {
 public:
  void add(std::uint32_t number);
  bool has(std::uint32_t number) const { return numbers_.count(number) > 0; }

 private:
  std::set<std::uint32_t> numbers_;
  std::deque<std::uint32_t> order_;
};

}  // namespace shoal
