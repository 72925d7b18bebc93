// CRC32C (Castagnoli), the checksum of iSCSI: RFC 3720, section 12.1, and appendix B.4 for test vectors.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shoal {

// Returns the checksum of n bytes at any alignment. For a message in pieces, pass the checksum of the previous ones
// as seed. Uses the SSE 4.2 instruction if the processor has it, else a table: 28 and 2.2 GB/s on a Xeon at 2.5 GHz.
std::uint32_t crc32c(const void* data, std::size_t n, std::uint32_t seed = 0);

// The table implementation, which tests compare with the other.
std::uint32_t crc32c_by_table(const void* data, std::size_t n, std::uint32_t seed = 0);

}  // namespace shoal
