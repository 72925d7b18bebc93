#include "transport/ofi.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "base/clock.h"
#include "base/crc32c.h"

namespace shoal {

namespace {

constexpr std::size_t kPrefixBytes = 16 + sizeof(FrameHeader);  // token and header
constexpr std::size_t kMaxPayloadBytes = 1 << 20;  // each rail holds at least 16 of them ready
constexpr std::size_t kUnderWay = 16;  // messages to one peer and rail: one that does not read fills no more of ours
constexpr std::uint64_t kSpinNs = 2'000'000;  // after something happened, where there is nothing to sleep on

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts(1);
  for (char letter : text) {
    if (letter == ',') parts.emplace_back();
    else parts.back() += letter;
  }
  return parts;
}

// What a peer is told: numbers of four bytes, texts and addresses with their length before them.
void put(std::string& out, std::size_t number) {
  for (int k = 0; k < 4; ++k) out += static_cast<char>(number >> (8 * k));
}

template <class Text>
void put(std::string& out, const Text& text) {
  put(out, text.size());
  out.append(text.begin(), text.end());
}

class Reader {
 public:
  explicit Reader(std::string text) : text_(std::move(text)) {}

  std::size_t number() {
    std::size_t value = 0;
    for (int k = 0; k < 4; ++k) value |= static_cast<std::size_t>(static_cast<std::uint8_t>(next())) << (8 * k);
    return value;
  }

  std::string text() {
    const std::size_t size = number();
    if (size > text_.size() - at_) throw std::runtime_error("what it tells about its rails is cut off");
    at_ += size;
    return text_.substr(at_ - size, size);
  }

 private:
  char next() {
    if (at_ >= text_.size()) throw std::runtime_error("what it tells about its rails is cut off");
    return text_[at_++];
  }

  std::string text_;
  std::size_t at_ = 0;
};

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
      tcp_(options_.tcp, *this),
      message_bytes_(std::min(options_.payload_bytes, kMaxPayloadBytes) + kPrefixBytes),
      random_(options_.shuffle) {
  for (const std::string& provider : split(options_.fabric)) {
    rails_.push_back(std::make_unique<Rail>(provider, options_.tcp.address, message_bytes_));
  }
  tcp_.take_in(*this);
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

// ---- who is where ---------------------------------------------------------------------------------------

void OfiTransport::call_peer(int peer, const Introduction& me, double timeout_s) {
  tcp_.call_peer(peer, me, timeout_s);
  post([this, peer] { tell(peer); });
}

int OfiTransport::on_identity(const Identity& who, std::string& why_not) {
  const int peer = sink_.on_identity(who, why_not);
  if (peer >= 0) post([this, peer] { tell(peer); });  // by then the connection is a peer's
  return peer;
}

void OfiTransport::tell(int peer) {
  Link& link = links_[peer];
  if (std::exchange(link.told, true)) return;
  const Bytes random = random_bytes(link.ours.size());
  std::copy(random.begin(), random.end(), link.ours.begin());
  peer_of_[link.ours] = peer;
  std::string text;
  put(text, random);
  put(text, message_bytes_);
  put(text, rails_.size());
  for (const auto& rail : rails_) {
    put(text, rail->provider());
    put(text, rail->address());
  }
  FrameHeader header;
  header.type = FrameType::fabric;
  tcp_.send(peer, header, payload_of(text));
}

// An empty string, or why its rails do not fit ours.
std::string OfiTransport::learn(Link& link, const Payload& payload) {
  try {
    Reader reader(text_of(payload));
    const std::string token = reader.text();
    if (token.size() != link.theirs.size()) return "its token has " + std::to_string(token.size()) + " bytes";
    std::copy(token.begin(), token.end(), link.theirs.begin());
    link.most_bytes = std::min(message_bytes_, reader.number());
    std::vector<fi_addr_t> at;
    std::string providers;
    const std::size_t count = reader.number();
    for (std::size_t k = 0; k < count; ++k) {
      const std::string provider = reader.text(), address = reader.text();
      providers += (k ? "," : "") + provider;
      if (k < rails_.size() && provider == rails_[k]->provider()) {
        at.push_back(rails_[k]->insert(Bytes(address.begin(), address.end())));
      }
    }
    if (providers != options_.fabric) {
      return "its libfabric providers are " + providers + ", ours " + options_.fabric + "; give all the same";
    }
    link.at = std::move(at);
    return "";
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

void OfiTransport::on_frame(int peer, const FrameHeader& header, Payload payload) {
  if (header.type != FrameType::fabric) return sink_.on_frame(peer, header, std::move(payload));
  Link& link = links_[peer];
  if (link.down || !link.at.empty()) return;
  if (const std::string wrong = learn(link, payload); !wrong.empty()) return tcp_.declare_down(peer, wrong);
  tcp_.count_connection(peer);
}

// What the peer sent before it went is heard first: all of it has arrived, or it would not have left.
void OfiTransport::on_down(int peer, const std::string& why) {
  read(true);
  forget(peer);
  sink_.on_down(peer, why);
}

void OfiTransport::drop(int peer) {
  forget(peer);
  tcp_.drop(peer);
}

// Its address stays in the rails' tables: to take one out while messages to it are under way is undefined.
void OfiTransport::forget(int peer) {
  Link& link = links_[peer];
  link.down = true;
  std::deque<Outgoing> queue;
  queue.swap(link.queue);  // letting go of payloads may call back
}

void OfiTransport::drop_data() {
  std::deque<Outgoing> all;
  for (auto& [peer, link] : links_) {
    std::move(link.queue.begin(), link.queue.end(), std::back_inserter(all));
    link.queue.clear();
  }
  tcp_.drop_data();
}

// ---- out ------------------------------------------------------------------------------------------------

void OfiTransport::send(int peer, FrameHeader header, Payload payload) {
  const auto found = links_.find(peer);
  const bool over_tcp = !carries_data(header.type) || found == links_.end() || found->second.at.empty() ||
                        kPrefixBytes + payload.size > found->second.most_bytes;
  if (over_tcp) return tcp_.send(peer, header, std::move(payload));
  Link& link = found->second;
  if (link.down) return;
  seal(header, payload);
  link.queue.push_back({header, std::move(payload)});
  pump(peer, link);
}

// Hands what waits for a peer to the rails by turns. False: some is left that no completion will wake us for.
bool OfiTransport::pump(int peer, Link& link) {
  try {
    while (!link.down && (link.refused || !link.queue.empty())) {
      if (link.under_way >= kUnderWay * rails_.size()) return true;
      Rail& rail = *rails_[link.next];
      if (!link.refused) {
        const Outgoing frame = std::move(link.queue.front());
        link.queue.pop_front();
        link.refused = rail.take();
        link.refused->peer = peer;
        link.refused_bytes = fill(*link.refused, link, frame);
      }
      if (!rail.post(link.refused, link.at[link.next], link.refused_bytes)) return false;
      link.refused = nullptr;
      link.next = (link.next + 1) % rails_.size();
      ++link.under_way;
      ++frames_sent_;
      bytes_sent_ += link.refused_bytes;
    }
  } catch (const std::runtime_error& error) {
    tcp_.suspect(peer, error.what());
    forget(peer);
  }
  return true;
}

std::size_t OfiTransport::fill(Rail::Slot& slot, const Link& link, const Outgoing& frame) const {
  std::memcpy(slot.data, link.theirs.data(), link.theirs.size());
  std::memcpy(slot.data + link.theirs.size(), &frame.header, sizeof frame.header);
  if (frame.payload.size) std::memcpy(slot.data + kPrefixBytes, frame.payload.data, frame.payload.size);
  return kPrefixBytes + frame.payload.size;
}

std::size_t OfiTransport::unsent_bytes() {
  std::size_t bytes = 0;
  for (const auto& [peer, link] : links_) {
    if (!link.down) bytes += (link.queue.size() + link.under_way + (link.refused ? 1 : 0)) * message_bytes_;
  }
  return bytes;
}

// ---- in -------------------------------------------------------------------------------------------------

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

// Hears what has come and frees what has gone; `all`: until nothing is left.
void OfiTransport::read(bool all) {
  do {
    std::vector<std::pair<std::size_t, Rail::Completion>> batch;
    std::vector<Rail::Completion> completions;
    for (std::size_t k = 0; k < rails_.size(); ++k) {
      completions.clear();
      rails_[k]->read(completions);
      for (Rail::Completion& each : completions) batch.emplace_back(k, std::move(each));
    }
    if (!batch.empty()) busy_ns_ = now_ns();
    const bool more = !batch.empty();
    if (options_.shuffle) shuffle(batch, all);
    for (const auto& [rail, completion] : batch) {
      if (completion.slot->receives) hear(rail, completion);
      else ended(rail, completion);
    }
    if (!more) return;
  } while (all);
}

// For tests: any order, and some only in a later round.
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
  --link.under_way;
  rails_[rail]->give_back(completion.slot);
  if (!completion.problem.empty() && !link.down) {
    tcp_.suspect(peer, completion.problem);
    forget(peer);
  }
}

void OfiTransport::hear(std::size_t rail, const Rail::Completion& completion) {
  Rail::Slot* const slot = completion.slot;
  const std::byte* const data = slot->data;
  Token token;
  FrameHeader header;
  int peer = -1;
  std::string wrong;
  Payload payload;
  if (completion.problem.empty() && completion.bytes >= kPrefixBytes) {
    std::memcpy(token.data(), data, token.size());
    std::memcpy(&header, data + token.size(), sizeof header);
    const auto found = peer_of_.find(token);
    if (found != peer_of_.end()) peer = found->second;
  }
  if (peer >= 0) {
    wrong = check_header(header);
    const std::size_t size = completion.bytes - kPrefixBytes;
    if (wrong.empty() && header.payload_bytes != size) wrong = "a message does not hold what its header announces";
    if (wrong.empty() && size && crc32c(data + kPrefixBytes, size) != header.payload_crc) {
      wrong = "a frame's payload does not match its checksum";
    }
    if (wrong.empty()) {
      const auto copy = pool_.take(size);
      if (size) std::memcpy(copy.get(), data + kPrefixBytes, size);
      payload = {copy.get(), size, copy, header.payload_crc, true};
    }
  }
  rails_[rail]->receive_again(slot);
  if (peer < 0) return stranger("it does not begin with a token of ours");
  if (links_[peer].down) return;
  ++frames_received_;
  bytes_received_ += completion.bytes;
  if (!wrong.empty()) return tcp_.declare_down(peer, wrong);
  sink_.on_frame(peer, header, std::move(payload));
}

void OfiTransport::stranger(const char* what) {
  if (strangers_++ < 10) std::fprintf(stderr, "shoal: dropped a message over libfabric: %s\n", what);
}

}  // namespace shoal
