// Diagnosis of ranks that issue different collectives.
#include <algorithm>
#include <tuple>

#include "engine/engine.h"

namespace shoal {

namespace {

constexpr std::size_t kNamedRanks = 8;

}  // namespace

// ---- announcements --------------------------------------------------------------------------------------

void Engine::announce(const Op& op) {
  broadcast(FrameType::announce, op.seq, 0, op.signature, describe(op.spec));
}

void Engine::on_announcement(int rank, const FrameHeader& header, const std::string& text) {
  const Announcement theirs{rank, header.signature, text};
  {
    const std::lock_guard lock(mutex_);
    std::vector<Announcement>& heard = announced_[header.seq];
    std::erase_if(heard, [&](const Announcement& each) { return each.rank == rank; });
    heard.push_back(theirs);
    if (header.seq >= next_seq_) return;
  }
  compare(header.seq, record_of(header.seq), theirs);
  diagnose(header.seq);
}

void Engine::compare(std::uint64_t seq, const Record& mine, const Announcement& theirs) {
  if (mine.seq != seq || mine.signature == theirs.signature) return;
  const bool first = options_.rank < theirs.rank;  // the message is the same on all ranks
  const std::string a = rank_name(options_.rank) + " asks for " + mine.text;
  const std::string b = rank_name(theirs.rank) + " asks for " + theirs.text;
  fail("the ranks do not agree about " + numbered(seq) + ": " + (first ? a : b) + ", " + (first ? b : a));
}

// Returns this rank's record of `seq`; one with another number if `seq` is too old or in the future.
Engine::Record Engine::record_of(std::uint64_t seq) {
  const std::lock_guard lock(mutex_);
  return records_[seq % kRecords];
}

// ---- conflicting frames ---------------------------------------------------------------------------------

// Either ranks issued different collectives, or a frame does not match its sender's collective. All ranks announce
// theirs: the first case shows in the announcements, the second where one contradicts its sender's frame.

void Engine::on_conflict(const SumServer::Conflict& conflict) {
  const auto& [first, second] = std::tie(conflict.first, conflict.second);
  if (first.signature != second.signature) {
    suspect(conflict.seq, first.peer, first.signature);
    return suspect(conflict.seq, second.peer, second.signature);
  }
  fail(rank_name(first.peer) + " sent chunk " + std::to_string(conflict.chunk) + " of " + numbered(conflict.seq) + " as " +
       first.sent + ", " + rank_name(second.peer) + " as " + second.sent);
}

// Reports a conflicting frame of `rank` to all.
void Engine::suspect(std::uint64_t seq, int rank, std::uint64_t signature) {
  broadcast(FrameType::mismatch, seq, static_cast<std::uint64_t>(rank), signature, "");
  add_suspicion(seq, {rank, signature, options_.rank});
}

void Engine::on_mismatch(int reporter, const FrameHeader& header) {
  if (header.chunk >= static_cast<std::uint64_t>(options_.size)) {
    return malformed(reporter, "it suspects rank " + std::to_string(header.chunk) + " of " + std::to_string(options_.size));
  }
  add_suspicion(header.seq, {static_cast<int>(header.chunk), header.signature, reporter});
}

void Engine::add_suspicion(std::uint64_t seq, const Suspicion& suspicion) {
  if (failed_) return;
  if (suspicions_.size() >= kRecords && !suspicions_.count(seq)) return;
  std::vector<Suspicion>& known = suspicions_[seq];
  if (known.size() >= static_cast<std::size_t>(2 * options_.size)) return;  // enough for a diagnosis
  known.push_back(suspicion);
  {
    const std::lock_guard lock(mutex_);
    if (seq >= next_seq_) {
      mismatch_reported_.insert(seq);
      return;
    }
  }
  const Record mine = record_of(seq);
  if (mine.seq != seq) return;
  diverged_ = true;
  if (known.size() == 1) {
    std::size_t count = 0;
    for (const OpPtr& op : pending_ops()) {  // ranks may have diverged at an earlier operation
      if (op->seq < seq && ++count <= kNamedRanks) announce(*op);
    }
    broadcast(FrameType::announce, seq, 0, mine.signature, mine.text);
  }
  diagnose(seq);
}

// Fails the group with the rank whose frame contradicts its announcement, or with the rank that reported a difference
// where there is none.
void Engine::diagnose(std::uint64_t seq) {
  const auto found = suspicions_.find(seq);
  if (failed_ || found == suspicions_.end()) return;
  const Record mine = record_of(seq);
  if (mine.seq != seq) return;
  std::map<int, Announcement> asked{{options_.rank, {options_.rank, mine.signature, mine.text}}};
  {
    const std::lock_guard lock(mutex_);
    const auto heard = announced_.find(seq);
    if (heard != announced_.end()) {
      for (const Announcement& each : heard->second) asked[each.rank] = each;
    }
  }
  for (const Suspicion& each : found->second) {
    const auto of_rank = asked.find(each.rank);
    if (of_rank == asked.end() || of_rank->second.signature == each.signature) continue;
    return fail(server_name(each.reporter) + " received a frame of " + rank_name(each.rank) + " about " + numbered(seq) +
                " with the signature of another operation than " + of_rank->second.text +
                ", which that rank issued: the memory or the program of one of them is corrupt");
  }
  if (asked.size() < static_cast<std::size_t>(options_.size)) return;  // different announcements would have failed the group
  const Suspicion& first = found->second.front();
  fail(server_name(first.reporter) + " reports that " + rank_name(first.rank) + " issued another operation as " + numbered(seq) +
       ", but all ranks issued " + mine.text);
}

}  // namespace shoal
