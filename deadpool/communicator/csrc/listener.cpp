#include "listener.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>

#include "page.h"
#include "registry.h"
#include "sockets.h"
#include "work.h"

namespace deadpool {
namespace {

constexpr int kTickMs = 50;  // the agent expects a tick at least every 100 ms
constexpr auto kStopLimit = std::chrono::seconds(2);

struct Frame {
  uint64_t kind;
  uint64_t generation;
};

int checked(int result, const char* what) {
  if (result < 0) {
    throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
  }
  return result;
}

}  // namespace

Listener& Listener::get() {
  static auto* listener = new Listener();
  return *listener;
}

void Listener::start(int close_fd) {
  if (thread_ != nullptr) {
    if (close_fd < 0 || socket_inode(close_fd) == socket_inode(channel_)) {
      return;
    }
    stop();
  }
  const int channel = close_fd < 0 ? -1 : checked(fcntl(close_fd, F_DUPFD_CLOEXEC, 0), "close channel");
  wake_fd_ = checked(eventfd(0, EFD_CLOEXEC), "eventfd");
  channel_ = channel;
  owner_pid_ = getpid();
  thread_ = std::make_unique<std::thread>([this, channel] { run(channel); });
}

void Listener::stop() {
  if (thread_ == nullptr || owner_pid_ != getpid()) {
    return;
  }
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = write(wake_fd_, &one, sizeof(one));
  thread_->join();
  thread_.reset();
  const auto deadline = std::chrono::steady_clock::now() + kStopLimit;
  while (closing_ > 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  close(wake_fd_);
  if (channel_ >= 0 && closing_ == 0) {
    close(channel_);
  }
  wake_fd_ = channel_ = -1;
}

void Listener::run(int channel) {
  pthread_setname_np(pthread_self(), "dp-listener");
  pollfd polled[2] = {{wake_fd_, POLLIN, 0}, {channel, POLLIN, 0}};
  while (true) {
    WorkerPage::get().tick();
    polled[0].revents = polled[1].revents = 0;
    if (poll(polled, channel < 0 ? 1 : 2, kTickMs) <= 0) {
      continue;  // a tick, or a signal
    }
    if (polled[0].revents != 0) {
      return;
    }
    Frame frame{};
    const ssize_t received = recv(channel, &frame, sizeof(frame), MSG_DONTWAIT);
    if (received < 0 && (errno == EAGAIN || errno == EINTR)) {
      continue;
    }
    if (received <= 0) {
      // The agent is gone, and with it the store of this host's snapshots: host loss. No exit handlers: nothing may be
      // written by a replaced worker.
      _exit(kExitReplaced);
    }
    if (received != sizeof(frame) || frame.kind != kFrameClose) {
      continue;
    }
    // On a thread of its own, so that ticks and EOF are not held up by an abort that takes long.
    ++closing_;
    std::thread([this, channel, generation = frame.generation] {
      Registry::get().close(generation);
      const Frame reply{kFrameClosed, generation};
      [[maybe_unused]] const auto sent = send(channel, &reply, sizeof(reply), MSG_NOSIGNAL);
      // Last: callbacks of failed futures may need the GIL, which the agent must not wait for.
      BlockedCalls::get().fail_all(generation);
      --closing_;
    }).detach();
  }
}

}  // namespace deadpool
