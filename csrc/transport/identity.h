// Names of processes and of groups' members, as they go over the wire.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <unordered_map>

#include "transport/transport.h"

namespace shoal {

inline constexpr std::size_t kMaxGroupName = 128;

// The place where a process listens. A helper has no process id: callers know only its address.
struct Place {
  std::string address;
  int port = 0;
  int pid = -1;
  PublicKey key = {};  // of the process, if it is known

  bool is_helper() const { return pid < 0; }
  // "10.0.0.4:4100 pid 812"; a helper's: "10.0.1.7:4000". The name by which the process introduces itself.
  std::string name() const;
};

inline constexpr std::size_t kMaxDataConnections = 64;  // of a process to another one, for each of its addresses

// The connections that a process has opened to this one: all of them come from one address, or from those in its name, and
// they are no more than a process opens.
class Arrivals {
 public:
  // Returns why this connection is none of the process's, or an empty string.
  std::string add(const Introduction& who);
  bool any() const { return count_ > 0; }

 private:
  std::string first_;  // address
  std::size_t count_ = 0;
};

// Another process, from its introduction, or from when this process has been told of it, until its connections end.
struct Process {
  std::string name;
  PublicKey key{};  // from the group's records, or from its first connection
  Arrivals arrivals;
  std::size_t num_connections = 0;  // established so far
  int num_called = 0;               // by this process
  bool is_called = false;           // by this process: it opens none itself
};

// The processes that this one knows, by their numbers as peers in a Sink.
class Processes {
 public:
  // Returns the number of the process with this name; a process that is not known gets one.
  int number_of(const std::string& name);
  // Returns the number of a process that opens a connection, or -1 with the reason why it may not. One that knocks is to be
  // called by this one; if it is not, it may knock again.
  int introduce(const Introduction& who, std::string& why_not);

  Process* find(int peer) {  // null: its connections have ended
    const auto found = processes_.find(peer);
    return found == processes_.end() ? nullptr : &found->second;
  }
  // Returns whether the process was known.
  bool remove(int peer);

 private:
  std::map<int, Process> processes_;
  std::unordered_map<std::string, int> numbers_;
  int next_ = 0;
};

// A member's claim when it joins a group.
struct Identity {
  std::string group;
  int rank = 0;
  int size = 0;
  int host = 0;       // index of the rank's host
  int num_hosts = 1;  // of the group
  std::string marks = {};  // of all ranks' keys, one after the other; empty: they are not known
};

// What stands for a public key in a member's claim: its first bytes, which no other key can be made to have.
inline constexpr std::size_t kMarkBytes = 16;
std::string mark_of(const PublicKey& key);

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
