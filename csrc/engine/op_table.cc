#include "engine/op_table.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "base/clock.h"
#include "base/crc32c.h"

namespace shoal {

namespace {

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {  // FNV-1a over eight bytes
  for (int k = 0; k < 8; ++k) hash = (hash ^ ((value >> (8 * k)) & 0xff)) * 0x100000001b3ULL;
  return hash;
}

std::uint64_t signature_of(const OpSpec& spec) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  hash = mix(hash, static_cast<std::uint64_t>(spec.kind));
  if (spec.kind == Kind::barrier) return hash;
  hash = mix(hash, static_cast<std::uint64_t>(spec.element));
  hash = mix(hash, static_cast<std::uint64_t>(spec.combine));
  hash = mix(hash, static_cast<std::uint64_t>(spec.root));
  if (spec.kind == Kind::delegated) {  // shapes may differ between ranks: only the name must match
    for (char c : spec.name) hash = mix(hash, static_cast<unsigned char>(c));
    return hash;
  }
  if (is_served(spec.kind)) {
    for (const std::uint64_t value : {std::uint64_t{spec.table}, std::uint64_t{spec.step}, std::uint64_t{spec.rule}, spec.place,
                                      static_cast<std::uint64_t>(spec.weights), std::uint64_t{spec.columns},
                                      std::uint64_t{spec.copied}}) {
      hash = mix(hash, value);
    }
    for (char c : spec.name) hash = mix(hash, static_cast<unsigned char>(c));
    if (spec.kind == Kind::configure) {
      for (std::uint64_t k = 0; k < spec.count; ++k) hash = mix(hash, static_cast<std::uint64_t>(spec.input[k]));
    }
    if (sends_coefficients(spec.kind)) {
      const std::size_t parts = is_factored(spec.kind) ? factor_parts(spec.count) : 1;
      hash = mix(hash, crc32c(spec.input, parts * coefficient_bytes(spec)));
    }
  }
  if (by_messages(spec.kind)) return hash;  // sizes differ between ranks; the receiver of each message compares them
  hash = mix(hash, spec.count);
  return mix(hash, static_cast<std::uint64_t>(spec.priority != 0));
}

}  // namespace

Op::Op(OpSpec of) : spec(std::move(of)), signature(signature_of(spec)) {}

// ---- counts ---------------------------------------------------------------------------------------------

void OpCounts::add(const OpSpec& spec) {
  Count& counted = spec.kind == Kind::delegated ? delegated_[spec.name] : of_kinds_[static_cast<std::size_t>(spec.kind)];
  counted.ops += 1;
  counted.bytes += spec.count * size_of(spec.element);
}

std::map<std::string, std::uint64_t> OpCounts::by_name() const {
  std::map<std::string, std::uint64_t> counts;
  const auto give = [&](const std::string& name, const Count& counted) {
    if (!counted.ops) return;
    counts["ops_" + name] += counted.ops;
    counts["bytes_" + name] += counted.bytes;
  };
  for (std::size_t kind = 0; kind < kNumKinds; ++kind) give(std::string(name_of(static_cast<Kind>(kind))), of_kinds_[kind]);
  for (const auto& [name, counted] : delegated_) give(name, counted);
  return counts;
}

// ---- the table ------------------------------------------------------------------------------------------

void OpTable::open() {
  const MutexLock lock(mutex_);
  open_ = true;
}

void OpTable::refuse() {
  const MutexLock lock(mutex_);
  throw GroupError(why_not_open());
}

std::string OpTable::why_not_open() const { return error_.empty() ? "group '" + group_ + "' is not open" : error_; }

void OpTable::add(const std::vector<OpPtr>& ops) {
  const MutexLock lock(mutex_);
  if (!open_) throw GroupError(why_not_open());
  for (const OpPtr& op : ops) {
    const bool message = is_message(op->spec.kind);
    op->seq = message ? kFirstMessage + num_messages_++ : num_submitted_.load();
    ops_.emplace(op->seq, op);
    counts_.add(op->spec);
    if (message) continue;
    num_submitted_ = op->seq + 1;
    records_[op->seq % kRecords] = {op->seq, op->signature, op->spec};
    op->in_question = !asked_for_.empty() && asked_for_.erase(op->seq) > 0;
  }
}

std::optional<OpTable::Record> OpTable::issued(std::uint64_t seq) {
  const MutexLock lock(mutex_);
  if (seq >= num_submitted_) asked_for_.insert(seq);
  const Record& record = records_[seq % kRecords];
  return record.seq == seq ? std::optional(record) : std::nullopt;
}

OpPtr OpTable::find(std::uint64_t seq) {
  const MutexLock lock(mutex_);
  const auto found = ops_.find(seq);
  return found == ops_.end() ? nullptr : found->second;
}

std::vector<OpPtr> OpTable::pending() {
  const MutexLock lock(mutex_);
  std::vector<OpPtr> ops;
  for (const auto& [seq, op] : ops_) ops.push_back(op);
  return ops;
}

// The last of an operation's reasons was released: it is over.
void OpTable::complete(const OpPtr& op, int reasons) {
  if (reasons < 1) {
    std::fprintf(stderr, "shoal: %s was released more often than held\n", numbered(op->seq).c_str());
    std::abort();
  }
  std::vector<std::function<void()>> then;
  {
    const MutexLock lock(mutex_);
    const auto found = ops_.find(op->seq);
    if (found == ops_.end()) return;  // end_all() came first
    ops_.erase(found);
    end(op->seq, *op, then);
    const bool none = ops_.empty() || ops_.begin()->first >= kFirstMessage;
    num_completed_ = none ? num_submitted_.load() : ops_.begin()->first;
  }
  changed_.notify_all();
  for (const auto& call : then) call();
}

void OpTable::end(std::uint64_t seq, Op& op, std::vector<std::function<void()>>& then) {
  if (!on_end_.empty()) {
    if (auto found = on_end_.extract(seq)) then.push_back(std::move(found.mapped()));
  }
  op.ended = true;
}

bool OpTable::wait(std::uint64_t seq, double timeout_s) {
  const auto deadline = std::chrono::steady_clock::now() + seconds(timeout_s < 0 ? 0 : timeout_s);
  const MutexLock lock(mutex_);
  while (ops_.count(seq)) {
    if (timeout_s < 0) changed_.wait(mutex_);
    else if (!changed_.wait_until(mutex_, deadline) && ops_.count(seq)) return false;
  }
  if (!failed_.empty() && failed_.count(seq)) throw GroupError(error_);
  return true;
}

bool OpTable::is_done(std::uint64_t seq) {
  const MutexLock lock(mutex_);
  return !ops_.count(seq);
}

void OpTable::on_end(std::uint64_t seq, std::function<void()> then) {
  {
    const MutexLock lock(mutex_);
    if (ops_.count(seq)) return static_cast<void>(on_end_.emplace(seq, std::move(then)));
  }
  then();
}

void OpTable::end_all(const std::string& reason) {
  std::vector<std::function<void()>> then;
  std::map<std::uint64_t, OpPtr> ended;
  {
    const MutexLock lock(mutex_);
    open_ = false;
    if (error_.empty()) error_ = reason;
    for (const auto& [seq, op] : ops_) {
      failed_.insert(seq);
      end(seq, *op, then);
    }
    ended.swap(ops_);
  }
  changed_.notify_all();
  for (const auto& call : then) call();
  // A contribution that was not sent may hold the operation that has it.
  for (const auto& [seq, op] : ended) {
    for (Op::Part& part : op->parts) part.contribution = {};
  }
}

bool OpTable::close() {
  const MutexLock lock(mutex_);
  open_ = false;
  return !std::exchange(closed_, true);
}

bool OpTable::is_closed() {
  const MutexLock lock(mutex_);
  return closed_;
}

std::map<std::string, std::uint64_t> OpTable::counters() {
  const MutexLock lock(mutex_);
  return counts_.by_name();
}

std::string OpTable::error() {
  const MutexLock lock(mutex_);
  return closed_ ? "" : error_;
}

}  // namespace shoal
