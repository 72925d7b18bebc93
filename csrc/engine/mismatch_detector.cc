#include "engine/mismatch_detector.h"

#include <algorithm>

namespace shoal {

namespace {

constexpr std::size_t kAnnouncedBefore = 8;

}  // namespace

bool MismatchDetector::differs(const FrameHeader& header) {
  const auto mine = ops_.issued(header.seq);
  return mine && mine->signature != header.signature;
}

// ---- announcements --------------------------------------------------------------------------------------

void MismatchDetector::begun(const Op& op) {
  announce(op);
  compare(op.seq);
  diagnose(op.seq);
}

void MismatchDetector::announce(const Op& op) {
  mailbox_.broadcast({FrameType::announce, op.seq, 0, op.signature, describe(op.spec)});
}

void MismatchDetector::on_announcement(int rank, const FrameHeader& header, const std::string& text) {
  if (members_.is_helper(rank)) throw ProtocolError(rank, "a helper issues no operations");
  if (announced_.size() >= OpTable::kRecords && !announced_.count(header.seq)) return;
  announced_[header.seq].insert_or_assign(rank, Announcement{header.signature, text});
  compare(header.seq);
  diagnose(header.seq);
}

void MismatchDetector::compare(std::uint64_t seq) {
  const auto mine = ops_.issued(seq);
  const auto said = announced_.find(seq);
  if (!mine || said == announced_.end()) return;
  for (const auto& [rank, theirs] : said->second) {
    if (mine->signature == theirs.signature) continue;
    const bool first = members_.rank < rank;  // the message is the same on all ranks
    const std::string a = members_.name_of(members_.rank) + " asks for " + describe(mine->spec);
    const std::string b = members_.name_of(rank) + " asks for " + theirs.text;
    throw GroupFailure("the ranks do not agree about " + numbered(seq) + ": " + (first ? a : b) + ", " + (first ? b : a));
  }
}

// ---- suspicions -----------------------------------------------------------------------------------------

void MismatchDetector::on_conflict(const SumServer::Conflict& conflict) {
  const SumServer::Sender &first = conflict.first, &second = conflict.second;
  if (first.signature != second.signature) {
    suspect(conflict.seq, first.peer, first.signature);
    return suspect(conflict.seq, second.peer, second.signature);
  }
  throw GroupFailure(members_.name_of(first.peer) + " sent chunk " + std::to_string(conflict.chunk) + " of " +
                     numbered(conflict.seq) + " as " + first.sent + ", " + members_.name_of(second.peer) + " as " + second.sent);
}

void MismatchDetector::suspect(std::uint64_t seq, int rank, std::uint64_t signature, int through) {
  mailbox_.broadcast({FrameType::mismatch, seq, static_cast<std::uint64_t>(rank), signature, "", through});
  add(seq, {rank, signature, members_.rank, through});
}

void MismatchDetector::on_mismatch(int reporter, const FrameHeader& header) {
  if (header.chunk >= static_cast<std::uint64_t>(members_.size())) {
    throw ProtocolError(reporter, "it suspects rank " + std::to_string(header.chunk) + " of " + std::to_string(members_.size()));
  }
  const bool through = 0 <= header.root && header.root < members_.size();
  add(header.seq, {static_cast<int>(header.chunk), header.signature, reporter, through ? header.root : -1});
}

void MismatchDetector::on_unexpected_result(int peer, const FrameHeader& header) {
  if (members_.is_helper(peer)) throw ProtocolError(peer, "a result that does not match the contribution");
  const bool forwarded = forwards(header.kind) && 0 <= header.root && header.root < members_.size() && header.root != peer;
  suspect(header.seq, forwarded ? header.root : peer, header.signature, forwarded ? peer : -1);
}

void MismatchDetector::add(std::uint64_t seq, const Suspicion& suspicion) {
  const auto mine = ops_.issued(seq);
  if (mine && mine->signature == suspicion.signature) return;
  if (suspicions_.size() >= OpTable::kRecords && !suspicions_.count(seq)) return;
  std::vector<Suspicion>& known = suspicions_[seq];
  if (known.size() >= static_cast<std::size_t>(2 * members_.size())) return;  // enough for a diagnosis
  known.push_back(suspicion);
  if (!mine) return;
  diverged_ = true;
  if (known.size() == 1) {
    std::size_t count = 0;
    for (const OpPtr& op : ops_.pending()) {  // ranks may have diverged at an earlier operation
      if (op->seq < seq && ++count <= kAnnouncedBefore) announce(*op);
    }
    mailbox_.broadcast({FrameType::announce, seq, 0, mine->signature, describe(mine->spec)});
  }
  diagnose(seq);
}

// Fails the group with the rank whose frame contradicts its announcement, and with the rank that reports it.
void MismatchDetector::diagnose(std::uint64_t seq) {
  const auto found = suspicions_.find(seq);
  if (found == suspicions_.end()) return;
  const auto mine = ops_.issued(seq);
  if (!mine) return;
  std::map<int, Announcement> asked;
  if (const auto said = announced_.find(seq); said != announced_.end()) asked = said->second;
  asked.insert_or_assign(members_.rank, Announcement{mine->signature, describe(mine->spec)});
  for (const Suspicion& each : found->second) {
    const auto of_rank = asked.find(each.rank);
    if (of_rank == asked.end() || of_rank->second.signature == each.signature) continue;
    const std::string through = each.through < 0 ? "" : " through " + members_.name_of(each.through);
    throw GroupFailure(members_.name_of(each.reporter) + " received a frame of " + members_.name_of(each.rank) + through + " about " +
                       numbered(seq) + " with the signature of another operation than " + of_rank->second.text +
                       ", which that rank issued: the memory or the program of one of them is corrupt");
  }
}

void MismatchDetector::forget_below(std::uint64_t seq) {
  suspicions_.erase(suspicions_.begin(), suspicions_.lower_bound(seq));
  announced_.erase(announced_.begin(), announced_.lower_bound(seq));
}

}  // namespace shoal
