// The memory of this machine.
#pragma once

#include <unistd.h>

#include <cstddef>

namespace shoal {

// 2 GiB where the system does not say.
inline std::size_t half_of_memory() {
  const auto pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGE_SIZE);
  return pages > 0 && size > 0 ? static_cast<std::size_t>(pages) * static_cast<std::size_t>(size) / 2 : std::size_t{1} << 31;
}

}  // namespace shoal
