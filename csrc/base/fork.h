// Sockets in children of fork().
#pragma once

namespace shoal {

// Has children close the socket: held open by them, it would hide the death of this process from its peers. A child that
// calls exec() loses it anyway (SOCK_CLOEXEC).
void close_in_children(int fd);

// Closes a socket that children close: from then on its number may be that of another file.
void close_socket(int fd);

}  // namespace shoal
