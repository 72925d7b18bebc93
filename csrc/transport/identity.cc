#include "transport/identity.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "base/crc32c.h"
#include "transport/address.h"

namespace shoal {

namespace {

constexpr std::size_t kWords = 5;         // rank, size, host, number of hosts, bytes of the name, which follows
constexpr std::size_t kMaxProcesses = 65536;  // whose names one process keeps
constexpr std::size_t kRemembered = 4096;  // groups that were left

}  // namespace

std::string Place::name() const {
  const std::string at = address + ":" + std::to_string(port);
  return is_helper() ? at : at + " pid " + std::to_string(pid);
}

std::string Arrivals::add(const Introduction& who) {
  std::vector<std::string> named;
  for (const std::string& each : addresses_of(who.name.substr(0, who.name.rfind(':')))) named.push_back(written_alike(each));
  const std::string from = written_alike(who.from);
  const auto is_named = [&](const std::string& address) { return std::ranges::count(named, address) > 0; };
  if (!any()) first_ = from;
  if (from != first_ && !(is_named(from) && is_named(first_))) {
    return "it takes the name of a process that is connected from " + first_;
  }
  if (count_ > kMaxDataConnections * named.size()) {
    return "its process has " + std::to_string(count_) + " connections already";
  }
  ++count_;
  return "";
}

int Processes::number_of(const std::string& name) {
  const auto [found, fresh] = numbers_.try_emplace(name, next_);
  if (fresh) processes_[next_++].name = name;
  return found->second;
}

int Processes::introduce(const Introduction& who, std::string& why_not) {
  if (who.knocks) {
    const auto known = numbers_.find(who.name);
    if (known == numbers_.end() || !processes_.at(known->second).is_called) return -1;
    const PublicKey& key = processes_.at(known->second).key;
    if (is_known(key) && key != who.key) why_not = "it takes the name of a process that has another public key";
    return why_not.empty() ? known->second : -1;
  }
  if (who.name.empty() || (processes_.size() >= kMaxProcesses && !numbers_.count(who.name))) {
    why_not = who.name.empty() ? "it has no name" : "too many processes are connected";
    return -1;
  }
  const int peer = number_of(who.name);
  Process& process = processes_[peer];
  if (process.is_called) why_not = "it takes the name of a process that opens no connections to this one";
  else if (is_known(process.key) && process.key != who.key) why_not = "it takes the name of a process that has another public key";
  else why_not = process.arrivals.add(who);
  if (!why_not.empty()) return -1;
  process.key = who.key;
  return peer;
}

bool Processes::remove(int peer) {
  const auto found = processes_.find(peer);
  if (found == processes_.end()) return false;
  numbers_.erase(found->second.name);
  processes_.erase(found);
  return true;
}

std::string mark_of(const PublicKey& key) { return {key.begin(), key.begin() + kMarkBytes}; }

std::uint32_t group_number(const std::string& group) { return crc32c(group.data(), group.size()); }

Payload join_payload(const Identity& who) {
  if (who.group.size() > kMaxGroupName) throw std::runtime_error("the group's name is too long");
  const std::int32_t words[kWords] = {who.rank, who.size, who.host, who.num_hosts, static_cast<std::int32_t>(who.group.size())};
  std::string text(sizeof words, '\0');
  std::memcpy(text.data(), words, sizeof words);
  return payload_of(text + who.group + who.marks);
}

Identity read_join(const FrameHeader& header, const Payload& payload) {
  std::int32_t words[kWords];
  const auto refuse = [&] { throw std::runtime_error("a member joins with " + std::to_string(payload.size()) + " bytes"); };
  if (payload.size() <= sizeof words) refuse();
  std::memcpy(words, payload.data(), sizeof words);
  const std::size_t left = payload.size() - sizeof words, length = static_cast<std::uint32_t>(words[4]);
  if (length == 0 || length > std::min(left, kMaxGroupName)) refuse();
  const bool knows_keys = left > length;
  if (knows_keys && (words[1] < 1 || left - length != kMarkBytes * static_cast<std::size_t>(words[1]))) refuse();
  const std::string text = text_of(payload);
  Identity who{text.substr(sizeof words, length), words[0], words[1], words[2], words[3], text.substr(sizeof words + length)};
  if (group_number(who.group) != header.group) throw std::runtime_error("a member joins a group by another's number");
  return who;
}

void LeftGroups::add(std::uint32_t number) {
  if (!numbers_.insert(number).second) return;
  order_.push_back(number);
  if (order_.size() <= kRemembered) return;
  numbers_.erase(order_.front());
  order_.pop_front();
}

}  // namespace shoal
