#include "transport/frame.h"

#include <array>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "base/crc32c.h"

namespace shoal {

namespace {

constexpr std::size_t kKeptBytes = std::size_t{32} << 20;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kChecked = true;
#else
constexpr bool kChecked = false;
#endif

Tag tag_with(std::uint32_t checksum) {
  Tag tag{};
  std::memcpy(tag.data(), &checksum, sizeof checksum);
  return tag;
}

template <class Code>
bool is_below(Code code, std::size_t count) {
  return static_cast<std::size_t>(code) < count;
}

std::string check_fields(const FrameHeader& header) {
  if (header.payload_bytes > kMaxPayload) {
    return "a frame announces " + std::to_string(header.payload_bytes) + " bytes; at most " +
           std::to_string(kMaxPayload) + " are allowed";
  }
  const bool known = header.type <= kLastFrameType && is_below(header.kind, kNumKinds) &&
                     is_below(header.element, kNumElements) && is_below(header.input, kNumElements) &&
                     is_below(header.combine, kNumCombines);
  return known ? "" : "a frame holds an unknown code";
}

}  // namespace

Payload Payload::owned_by(std::shared_ptr<const void> owner) const {
  Payload payload(data_, size_, std::move(owner));
  payload.checksum_ = checksum_;
  return payload;
}

Payload Payload::copied_to(std::shared_ptr<std::byte> buffer) const {
  if (size_) std::memcpy(buffer.get(), data_, size_);
  Payload payload = of_buffer(std::move(buffer), size_);
  payload.checksum_ = checksum_;
  return payload;
}

std::byte* Payload::writable() {
  if (!buffer_ || owner_.use_count() != 1) throw std::logic_error("bytes that others have are to be written");
  checksum_.reset();
  among_copies_.reset();
  return buffer_;
}

std::uint32_t Payload::checksum() {
  constexpr std::uint64_t kKnown = std::uint64_t{1} << 32;
  const std::uint64_t told = among_copies_ ? among_copies_->load() : 0;
  if (!checksum_ && told) checksum_ = static_cast<std::uint32_t>(told);
  if (checksum_ && !kChecked) return *checksum_;
  const std::uint32_t now = size_ ? crc32c(data_, size_) : 0;
  if (among_copies_) *among_copies_ = kKnown | now;
  if (checksum_.value_or(now) != now) {
    std::fprintf(stderr, "shoal: a payload of %zu bytes was written after its checksum was known\n", size_);
    std::abort();
  }
  checksum_ = now;
  return now;
}

void set_checksums(FrameHeader& header, Payload& payload) {
  header.magic = kFrameMagic;
  header.payload_bytes = static_cast<std::uint32_t>(payload.size());
  header.payload_tag = tag_with(payload.checksum());
  header.tag = tag_with(crc32c(&header, kTaggedBytes));
}

std::uint32_t checksum_in(const Tag& tag) {
  std::uint32_t checksum;
  std::memcpy(&checksum, tag.data(), sizeof checksum);
  return checksum;
}

std::string check_header(const FrameHeader& header) {
  if (header.magic != kFrameMagic) return "a frame does not begin with shoal's magic number";
  if (header.tag != tag_with(crc32c(&header, kTaggedBytes))) return "a frame header does not match its checksum";
  return check_fields(header);
}

Payload payload_of(const std::string& text) {
  auto owner = std::make_shared<std::string>(text);
  return {reinterpret_cast<const std::byte*>(owner->data()), owner->size(), owner};
}

std::string text_of(const Payload& payload) {
  return {reinterpret_cast<const char*>(payload.data()), payload.size()};
}

struct BufferPool::Shelves {
  std::mutex mutex;
  std::array<std::vector<std::unique_ptr<std::byte[]>>, 48> free;  // by log2 of their size
  std::size_t kept_bytes = 0;

  // Keeps a buffer that nobody uses. Those of other sizes make room for it: sizes that are no longer asked for go.
  void keep(std::unique_ptr<std::byte[]> buffer, std::size_t shelf) {
    for (std::size_t other = 0; other < free.size(); ++other) {
      while (other != shelf && !free[other].empty() && kept_bytes + (std::size_t{1} << shelf) > kKeptBytes) pop(other);
    }
    if (kept_bytes + (std::size_t{1} << shelf) > kKeptBytes) return;
    kept_bytes += std::size_t{1} << shelf;
    free[shelf].push_back(std::move(buffer));
  }

  std::unique_ptr<std::byte[]> pop(std::size_t shelf) {
    std::unique_ptr<std::byte[]> buffer = std::move(free[shelf].back());
    free[shelf].pop_back();
    kept_bytes -= std::size_t{1} << shelf;
    return buffer;
  }
};

BufferPool::BufferPool() : shelves_(std::make_shared<Shelves>()) {}

std::shared_ptr<std::byte> BufferPool::take(std::size_t size) {
  const auto shelf = static_cast<std::size_t>(std::bit_width(std::max<std::size_t>(size, 64) - 1));
  std::unique_ptr<std::byte[]> buffer;
  {
    const std::lock_guard lock(shelves_->mutex);
    if (!shelves_->free[shelf].empty()) buffer = shelves_->pop(shelf);
  }
  if (!buffer) buffer.reset(new std::byte[std::size_t{1} << shelf]);
  return {buffer.release(), [shelves = shelves_, shelf](std::byte* data) {
            std::unique_ptr<std::byte[]> back(data);
            const std::lock_guard lock(shelves->mutex);
            shelves->keep(std::move(back), shelf);
          }};
}

void BufferPool::clear() {
  const std::lock_guard lock(shelves_->mutex);
  for (auto& free : shelves_->free) free.clear();
  shelves_->kept_bytes = 0;
}

Protection protection_named(const std::string& name) {
  static constexpr std::array<const char*, kNumProtections> kNames{"checksum", "tag", "encrypt"};
  for (std::size_t k = 0; k < kNames.size(); ++k) {
    if (name == kNames[k]) return static_cast<Protection>(k);
  }
  throw std::invalid_argument("protection is '" + name + "'; it is checksum, tag or encrypt");
}

Seal::Seal(Protection protection, const Gcm::Key& key) : encrypts_(protection == Protection::encrypt) {
  if (protection != Protection::checksum) gcm_.emplace(key);
}

Gcm::Nonce Seal::nonce(Part part) const {
  Gcm::Nonce nonce{};
  std::memcpy(nonce.data(), &number_, sizeof number_);
  nonce[sizeof number_] = static_cast<std::uint8_t>(part);
  return nonce;
}

Payload Seal::close(FrameHeader& header, Payload payload, BufferPool& pool) {
  if (!gcm_) {
    set_checksums(header, payload);
    return payload;
  }
  header.magic = kFrameMagic;
  header.payload_bytes = static_cast<std::uint32_t>(payload.size());
  header.payload_tag = {};
  if (payload.size() && encrypts_) {
    Payload sealed = pool.payload(payload.size());
    header.payload_tag = gcm_->encrypt(nonce(Part::payload), payload.data(), payload.size(), sealed.writable());
    payload = std::move(sealed);
  } else if (payload.size()) {
    header.payload_tag = gcm_->tag_of(nonce(Part::payload), payload.data(), payload.size());
  }
  header.tag = gcm_->tag_of(nonce(Part::header), &header, kTaggedBytes);
  ++number_;
  return payload;
}

std::string Seal::check(const FrameHeader& header) {
  if (!gcm_) return check_header(header);
  if (header.magic != kFrameMagic) return "a frame does not begin with shoal's magic number";
  if (!equal_in_constant_time(gcm_->tag_of(nonce(Part::header), &header, kTaggedBytes), header.tag)) {
    return "a frame header does not match its tag: it was changed on the way, or somebody else has sent it";
  }
  return check_fields(header);
}

Payload Seal::open(const FrameHeader& header, std::shared_ptr<std::byte> buffer) {
  const std::size_t size = header.payload_bytes;
  if (!gcm_) {
    Payload payload = Payload::of_buffer(std::move(buffer), size);
    if (size && payload.checksum() != checksum_in(header.payload_tag)) {
      throw std::runtime_error("a frame's payload does not match its checksum");
    }
    return payload;
  }
  const Gcm::Nonce nonce = this->nonce(Part::payload);
  const bool same = size == 0 || (encrypts_ ? gcm_->decrypt(nonce, buffer.get(), size, header.payload_tag, buffer.get())
                                            : equal_in_constant_time(gcm_->tag_of(nonce, buffer.get(), size), header.payload_tag));
  if (!same) throw std::runtime_error("a frame's payload does not match its tag: it was changed on the way, or somebody else has sent it");
  ++number_;
  return Payload::of_buffer(std::move(buffer), size);
}

}  // namespace shoal
