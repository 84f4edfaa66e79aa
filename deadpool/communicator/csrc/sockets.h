// Sockets of this process, found and shut down without the GIL: the abort that gloo lacks.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <set>

namespace deadpool {

using Inodes = std::set<ino_t>;

// Inodes of all TCP sockets (IPv4 and IPv6, stream) of this process. A number that is closed and used again has another inode.
Inodes tcp_sockets();

// Inode of one socket; 0 if `fd` is none.
ino_t socket_inode(int fd);

// Ends the receiving side of every connected socket in `inodes`: gloo's thread reads the end of the stream, fails all
// operations of that connection and closes it. The descriptors stay with their owner. Not SHUT_RDWR: an operation that writes
// before gloo's thread has woken would fail with EPIPE, which gloo forgets to tell its waiter. Listening sockets are skipped:
// shutting one down makes gloo call std::terminate. Returns how many were shut down.
int shutdown_sockets(const Inodes& inodes);

}  // namespace deadpool
