#include "transport/ofi.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "base/clock.h"
#include "base/crc32c.h"
#include "transport/address.h"

namespace shoal {

namespace {

constexpr std::size_t kPrefixBytes = 16 + sizeof(FrameHeader);  // token and header
constexpr std::size_t kMaxPayloadBytes = 1 << 20;  // each rail posts at least 16 receives
constexpr std::size_t kMaxInFlight = 16;  // messages in flight per peer and rail; bounds the memory of a peer that does not read
constexpr std::uint64_t kSpinNs = 2'000'000;  // polling time after an event, where there is no file descriptor to sleep on

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts(1);
  for (char letter : text) {
    if (letter == ',') parts.emplace_back();
    else parts.back() += letter;
  }
  return parts;
}

// The rails belong to one thread, which is TCP's first.
TcpOptions on_one_thread(TcpOptions options) {
  options.num_threads = 1;
  return options;
}

// Returns an empty string, or what is wrong with a message.
std::string check_message(const FrameHeader& header, const std::byte* data, std::size_t size) {
  if (std::string wrong = check_header(header); !wrong.empty()) return wrong;
  if (header.payload_bytes != size) return "the size of a message does not match its header";
  if (size && crc32c(data, size) != checksum_in(header.payload_tag)) return "a frame's payload does not match its checksum";
  return "";
}

}  // namespace

std::string try_rail(const std::string& provider, const std::string& address) {
  try {
    Rail(provider, address, TransportOptions{}.payload_bytes + kPrefixBytes);
    return "";
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

OfiTransport::OfiTransport(TransportOptions options, Sink& sink)
    : options_(std::move(options)),
      sink_(sink),
      tcp_(on_one_thread(options_.tcp), *this),
      message_bytes_(std::min(options_.payload_bytes, kMaxPayloadBytes) + kPrefixBytes),
      random_(options_.shuffle) {
  for (const std::string& provider : split(options_.fabric)) {
    rails_.push_back(std::make_unique<Rail>(provider, addresses_of(options_.tcp.address).front(), message_bytes_));
  }
  tcp_.add_poll_source(*this);
}

OfiTransport::~OfiTransport() { stop(); }

void OfiTransport::stop() {
  tcp_.stop();
  for (auto& [peer, link] : links_) std::exchange(link.queue, {}).clear();
  rails_.clear();
}

std::map<std::string, std::uint64_t> OfiTransport::counters() const {
  auto counts = tcp_.counters();
  counts["fabric_frames_sent"] = frames_sent_;
  counts["fabric_bytes_sent"] = bytes_sent_;
  counts["bytes_sent"] += bytes_sent_;
  counts["bytes_received"] += bytes_received_;
  counts["frames_sent"] += frames_sent_;
  counts["frames_received"] += frames_received_;
  counts["strangers_dropped"] += strangers_;
  return counts;
}

// ---- sending --------------------------------------------------------------------------------------------

void OfiTransport::drop_data(std::uint32_t group, int only) {
  std::deque<Outgoing> dropped;  // releasing payloads may call back
  for (auto& [peer, link] : links_) {
    if (only >= 0 && peer != only) continue;
    std::deque<Outgoing> all = std::exchange(link.queue, {});
    for (Outgoing& frame : all) (frame.header.group == group ? dropped : link.queue).push_back(std::move(frame));
  }
  tcp_.drop_data(group, only);
}

void OfiTransport::send(int peer, FrameHeader header, Payload payload) {
  const auto found = links_.find(peer);
  const bool over_tcp = !carries_data(header.type) || found == links_.end() || found->second.at.empty() ||
                        kPrefixBytes + payload.size() > found->second.most_bytes;
  if (over_tcp) return tcp_.send(peer, header, std::move(payload));
  Link& link = found->second;
  if (link.down) return;
  set_checksums(header, payload);
  link.queue.push_back({header, std::move(payload), link.num_queued++});
  pump(peer, link);
}

// Distributes the messages queued for a peer over the rails in turn.
void OfiTransport::pump(int peer, Link& link) {
  try {
    while (!link.down && (link.refused || !link.queue.empty())) {
      if (link.in_flight.size() >= kMaxInFlight * rails_.size()) return;
      Rail& rail = *rails_[link.next];
      if (!link.refused) {
        const Outgoing frame = std::move(link.queue.front());
        link.queue.pop_front();
        link.refused = rail.take();
        link.refused->peer = peer;
        link.refused->number = frame.number;
        link.refused_bytes = fill(*link.refused, link, frame);
      }
      if (!rail.post(link.refused, link.at[link.next], link.refused_bytes)) return;
      link.in_flight.insert(link.refused->number);
      link.refused = nullptr;
      link.next = (link.next + 1) % rails_.size();
      ++frames_sent_;
      bytes_sent_ += link.refused_bytes - sizeof(Token);
    }
  } catch (const std::runtime_error& error) {
    lose(peer, error.what());
  }
}

std::size_t OfiTransport::fill(Rail::Slot& slot, const Link& link, const Outgoing& frame) const {
  std::memcpy(slot.data, link.theirs.data(), link.theirs.size());
  std::memcpy(slot.data + link.theirs.size(), &frame.header, sizeof frame.header);
  if (frame.payload.size()) std::memcpy(slot.data + kPrefixBytes, frame.payload.data(), frame.payload.size());
  return kPrefixBytes + frame.payload.size();
}

std::size_t OfiTransport::unsent_bytes(int peer, std::uint64_t mark) {
  const Link& link = links_[peer];
  if (link.down) return 0;
  const auto before = [mark](std::uint64_t number) { return number < mark; };
  auto messages = static_cast<std::size_t>(std::ranges::count_if(link.in_flight, before));
  for (const Outgoing& frame : link.queue) messages += before(frame.number);
  if (link.refused) messages += before(link.refused->number);
  return messages * message_bytes_;
}

std::size_t OfiTransport::held_bytes(int peer) const {
  const auto found = links_.find(peer);
  std::size_t bytes = tcp_.held_bytes(peer);
  if (found == links_.end()) return bytes;
  for (const Outgoing& frame : found->second.queue) bytes += frame.payload.size();
  return bytes;
}

// ---- receiving ------------------------------------------------------------------------------------------

std::vector<int> OfiTransport::wait_fds() {
  std::vector<int> fds;
  for (const auto& rail : rails_) {
    if (rail->wait_fd() >= 0) fds.push_back(rail->wait_fd());
  }
  return fds;
}

int OfiTransport::max_wait_ms() {
  if (!kept_.empty()) return 0;
  int most_ms = -1;
  for (const auto& rail : rails_) {
    if (rail->wait_fd() >= 0 && rail->may_sleep()) continue;
    if (rail->wait_fd() >= 0 || now_ns() - busy_ns_ < kSpinNs) return 0;
    most_ms = 1;
  }
  for (auto& [peer, link] : links_) {
    if (link.refused && !link.down) most_ms = 1;
  }
  return most_ms;
}

void OfiTransport::work() {
  read(false);
  for (auto& [peer, link] : links_) pump(peer, link);
}

// Processes received messages and completed sends; `all`: until none are left.
void OfiTransport::read(bool all) {
  try {
    while (read_once(all) && all) {
    }
  } catch (const std::runtime_error& error) {  // this process's rail is broken: no peer is reachable
    for (auto& [peer, link] : links_) {
      if (!link.down) lose(peer, error.what());
    }
  }
}

// Returns whether there were any completions.
bool OfiTransport::read_once(bool all) {
  std::vector<std::pair<std::size_t, Rail::Completion>> batch;
  std::vector<Rail::Completion> completions;
  for (std::size_t k = 0; k < rails_.size(); ++k) {
    completions.clear();
    rails_[k]->read(completions);
    for (Rail::Completion& each : completions) batch.emplace_back(k, std::move(each));
  }
  const bool any = !batch.empty();
  if (any) busy_ns_ = now_ns();
  if (options_.shuffle) shuffle(batch, all);
  for (const auto& [rail, completion] : batch) {
    if (completion.slot->receives) hear(rail, completion);
    else ended(rail, completion);
  }
  return any;
}

// For tests: shuffles completions, and delays some.
void OfiTransport::shuffle(std::vector<std::pair<std::size_t, Rail::Completion>>& batch, bool all) {
  for (auto& each : std::exchange(kept_, {})) batch.push_back(std::move(each));
  std::shuffle(batch.begin(), batch.end(), random_);
  while (!all && !batch.empty() && random_() % 2) {
    kept_.push_back(std::move(batch.back()));
    batch.pop_back();
  }
}

void OfiTransport::ended(std::size_t rail, const Rail::Completion& completion) {
  const int peer = completion.slot->peer;
  Link& link = links_[peer];
  link.in_flight.erase(completion.slot->number);
  rails_[rail]->give_back(completion.slot);
  if (!completion.problem.empty() && !link.down) lose(peer, completion.problem);
}

// Returns the peer whose token a message begins with; -1 for a stranger.
int OfiTransport::sender_of(const Rail::Completion& completion) const {
  if (!completion.problem.empty() || completion.bytes < kPrefixBytes) return -1;
  Token token;
  std::memcpy(token.data(), completion.slot->data, token.size());
  const auto found = peer_of_.find(token);
  return found == peer_of_.end() ? -1 : found->second;
}

void OfiTransport::hear(std::size_t rail, const Rail::Completion& completion) {
  Rail::Slot* const slot = completion.slot;
  const int peer = sender_of(completion);
  if (peer < 0) stranger("it does not begin with a known token");
  const auto link = links_.find(peer);
  if (link == links_.end() || link->second.down) return rails_[rail]->receive_again(slot);
  FrameHeader header;
  std::memcpy(&header, slot->data + sizeof(Token), sizeof header);
  const std::byte* const data = slot->data + kPrefixBytes;
  const std::size_t size = completion.bytes - kPrefixBytes;
  const std::string wrong = check_message(header, data, size);
  Payload payload;
  if (wrong.empty()) {
    std::shared_ptr<std::byte> place = sink_.place_for(peer, header);
    if (!place) place = pool_.take(size);
    if (size) std::memcpy(place.get(), data, size);
    payload = Payload::received(std::move(place), size, checksum_in(header.payload_tag));
  }
  rails_[rail]->receive_again(slot);
  ++frames_received_;
  bytes_received_ += completion.bytes;
  if (!wrong.empty()) return tcp_.declare_down(peer, wrong);
  sink_.on_frame(peer, header, std::move(payload));
}

void OfiTransport::stranger(const char* what) {
  if (strangers_++ < 10) std::fprintf(stderr, "shoal: dropped a message over libfabric: %s\n", what);
}

}  // namespace shoal
