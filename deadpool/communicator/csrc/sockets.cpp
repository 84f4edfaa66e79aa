#include "sockets.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>

namespace deadpool {
namespace {

bool is_tcp(int fd) {
  int domain = 0;
  int type = 0;
  socklen_t length = sizeof(domain);
  if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) != 0) {
    return false;  // not a socket, or closed meanwhile
  }
  length = sizeof(type);
  if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) != 0) {
    return false;
  }
  return (domain == AF_INET || domain == AF_INET6) && type == SOCK_STREAM;
}

bool is_listening(int fd) {
  int listening = 0;
  socklen_t length = sizeof(listening);
  return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &length) != 0 || listening != 0;
}

template <class Visit>
void for_each_fd(Visit visit) {
  DIR* folder = opendir("/proc/self/fd");
  if (folder == nullptr) {
    return;
  }
  while (const dirent* item = readdir(folder)) {
    if (item->d_name[0] != '.') {
      visit(std::atoi(item->d_name));
    }
  }
  closedir(folder);
}

}  // namespace

ino_t socket_inode(int fd) {
  struct stat info {};
  return fstat(fd, &info) == 0 && S_ISSOCK(info.st_mode) ? info.st_ino : 0;
}

Inodes tcp_sockets() {
  Inodes found;
  for_each_fd([&](int fd) {
    if (is_tcp(fd)) {
      found.insert(socket_inode(fd));
    }
  });
  found.erase(0);
  return found;
}

int shutdown_sockets(const Inodes& inodes) {
  int count = 0;
  if (inodes.empty()) {
    return count;
  }
  for_each_fd([&](int fd) {
    if (inodes.count(socket_inode(fd)) == 0) {
      return;
    }
    // The owner may close and reuse the number at any time: hold our own reference and look again.
    const int held = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (held < 0) {
      return;
    }
    if (inodes.count(socket_inode(held)) != 0 && !is_listening(held) && shutdown(held, SHUT_RD) == 0) {
      ++count;
    }
    close(held);
  });
  return count;
}

}  // namespace deadpool
