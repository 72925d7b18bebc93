#include "transport/frame.h"

#include <array>
#include <bit>
#include <cstring>
#include <mutex>
#include <vector>

#include "base/crc32c.h"

namespace shoal {

namespace {

constexpr std::size_t kCoveredBytes = offsetof(FrameHeader, header_crc);
constexpr std::uint8_t kLastKind = 18;  // of engine/types.h
constexpr std::size_t kKeptBytes = std::size_t{32} << 20;  // per size

}  // namespace

void set_checksums(FrameHeader& header, Payload& payload) {
  if (!payload.has_crc) {
    payload.crc = payload.size ? crc32c(payload.data, payload.size) : 0;
    payload.has_crc = true;
  }
  header.magic = kFrameMagic;
  header.payload_bytes = static_cast<std::uint32_t>(payload.size);
  header.payload_crc = payload.crc;
  header.header_crc = crc32c(&header, kCoveredBytes);
}

std::string check_header(const FrameHeader& header) {
  if (header.magic != kFrameMagic) return "a frame does not begin with shoal's magic number";
  if (header.header_crc != crc32c(&header, kCoveredBytes)) return "a frame header does not match its checksum";
  if (header.payload_bytes > kMaxPayload) {
    return "a frame announces " + std::to_string(header.payload_bytes) + " bytes; at most " +
           std::to_string(kMaxPayload) + " are allowed";
  }
  if (header.type > FrameType::path_lost || header.kind > kLastKind || header.element > 7 || header.input > 7 ||
      header.combine > 7) {
    return "a frame holds an unknown code";
  }
  return "";
}

Payload payload_of(const std::string& text) {
  auto owner = std::make_shared<std::string>(text);
  return {reinterpret_cast<const std::byte*>(owner->data()), owner->size(), owner, 0, false};
}

std::string text_of(const Payload& payload) {
  return {reinterpret_cast<const char*>(payload.data), payload.size};
}

struct BufferPool::Shelves {
  std::mutex mutex;
  std::array<std::vector<std::unique_ptr<std::byte[]>>, 48> free;  // by log2 of their size
};

BufferPool::BufferPool() : shelves_(std::make_shared<Shelves>()) {}

std::shared_ptr<std::byte[]> BufferPool::take(std::size_t size) {
  const auto shelf = static_cast<std::size_t>(std::bit_width(std::max<std::size_t>(size, 64) - 1));
  const std::size_t room = std::size_t{1} << shelf;
  std::unique_ptr<std::byte[]> buffer;
  {
    const std::lock_guard lock(shelves_->mutex);
    auto& free = shelves_->free[shelf];
    if (!free.empty()) {
      buffer = std::move(free.back());
      free.pop_back();
    }
  }
  if (!buffer) buffer.reset(new std::byte[room]);
  return {buffer.release(), [shelves = shelves_, shelf, room](std::byte* data) {
            std::unique_ptr<std::byte[]> back(data);
            const std::lock_guard lock(shelves->mutex);
            auto& free = shelves->free[shelf];
            if ((free.size() + 1) * room <= kKeptBytes) free.push_back(std::move(back));
          }};
}

}  // namespace shoal
