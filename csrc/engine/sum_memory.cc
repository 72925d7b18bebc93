#include "engine/sum_memory.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/machine_memory.h"

namespace shoal {

std::vector<std::vector<int>> jobs_of(const std::vector<std::vector<int>>& groups) {
  std::vector<std::size_t> into(groups.size());  // the group that a group is merged into
  std::iota(into.begin(), into.end(), std::size_t{0});
  const auto root_of = [&into](std::size_t group) {
    while (into[group] != group) group = into[group] = into[into[group]];
    return group;
  };
  std::map<int, std::size_t> group_of;
  for (std::size_t group = 0; group < groups.size(); ++group) {
    for (int peer : groups[group]) into[root_of(group_of.try_emplace(peer, group).first->second)] = root_of(group);
  }
  std::map<std::size_t, std::vector<int>> jobs;
  for (const auto& [peer, group] : group_of) jobs[root_of(group)].push_back(peer);
  std::vector<std::vector<int>> all;
  for (auto& [root, peers] : jobs) all.push_back(std::move(peers));
  return all;
}

SumMemory::SumMemory(std::size_t max_bytes) : max_bytes_(max_bytes ? max_bytes : half_of_memory()) {}

void SumMemory::share(const std::vector<std::vector<int>>& groups) {
  jobs_ = jobs_of(groups);
  shares_.clear();
  std::size_t num_processes = 0;
  for (const auto& job : jobs_) num_processes += job.size();
  const std::size_t own = std::min(max_bytes_, num_processes * kLeastBytes), left = max_bytes_ - own;
  for (std::size_t job = 0; job < jobs_.size(); ++job) {
    const std::size_t more = std::min(left / jobs_.size() / jobs_[job].size(), kMostBytes - kLeastBytes);
    for (int peer : jobs_[job]) shares_[peer] = {job, kLeastBytes + more};
  }
}

std::size_t SumMemory::most_bytes(int peer) const {
  const auto found = shares_.find(peer);
  return found == shares_.end() ? kLeastBytes : found->second.most_bytes;
}

std::size_t SumMemory::held_bytes(int peer) const {
  const auto found = accounts_.find(peer);
  return found == accounts_.end() ? 0 : found->second->load();
}

Payload SumMemory::charged(int peer, std::size_t beside, const Payload& payload) {
  Account& account = accounts_[peer];
  if (!account) account = std::make_shared<std::atomic<std::size_t>>(0);
  const std::size_t bytes = beside + payload.size();
  for (const Account& each : {account, held_}) *each += bytes;
  const auto give_back = [account = account, held = held_, bytes, owner = payload.owner()](const void*) {
    *account -= bytes;
    *held -= bytes;
  };
  return payload.owned_by({static_cast<const void*>(payload.data()), give_back});
}

std::size_t SumMemory::job_bytes(int peer) const {
  const std::vector<int>& job = jobs_[shares_.at(peer).job];
  return std::max(max_bytes_ / jobs_.size(), job.size() * most_bytes(peer));
}

bool SumMemory::exceeds(int peer) const {
  const auto found = shares_.find(peer);
  if (*held_ <= max_bytes_ || found == shares_.end()) return false;
  std::size_t bytes = 0;
  for (int each : jobs_[found->second.job]) bytes += held_bytes(each);
  return bytes > job_bytes(peer);
}

}  // namespace shoal
