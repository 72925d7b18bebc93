#include "transport/seal.h"

#include <array>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace shoal {

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
