#include "registry.h"

#include <sys/socket.h>

#include <algorithm>
#include <chrono>

#include "backend.h"
#include "errors.h"
#include "nccl.h"
#include "page.h"

namespace deadpool {
namespace {

using Clock = std::chrono::steady_clock;

// After a close a build whose sockets were shut down ends within a millisecond; one that does not is waiting for a peer to
// connect and is abandoned.
constexpr auto kAbandonGrace = std::chrono::milliseconds(200);
constexpr auto kRescan = std::chrono::milliseconds(2);

}  // namespace

Registry& Registry::get() {
  static auto* registry = new Registry();
  return *registry;
}

void Registry::open(uint64_t generation) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (generation <= closed_) {
    throw_aborted("*", generation, "closed before it was opened");
  }
  opened_.store(generation, std::memory_order_release);
}

void Registry::close(uint64_t generation) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (generation > closed_) {
      closed_.store(generation, std::memory_order_release);
      WorkerPage::get().set_closed_generation(generation);
    }
    for (const auto& socket : store_sockets_) {
      if (socket.generation <= generation && socket_inode(socket.fd) == socket.inode) {
        shutdown(socket.fd, SHUT_RDWR);
      }
    }
  }
  changed_.notify_all();
  abort_built(generation);
  abort_half_built(generation);
}

void Registry::abort_built(uint64_t generation) {
  Inodes sockets;
  std::vector<BackendPtr> nccl;
  std::vector<int64_t> raw;
  for (const auto& handle : handles()) {
    Inner inner = handle->take_inner(generation);
    if (!inner.communicator) {
      continue;
    }
    sockets.insert(inner.sockets.begin(), inner.sockets.end());
    if (inner.is_nccl) {
      nccl.push_back(inner.communicator);
      raw.push_back(inner.nccl_raw);
    }
    bury(std::move(inner));
  }
  shutdown_sockets(sockets);
  if (!nccl.empty() && !revoke_nccl(raw)) {
    // Not waited for: handles are closed and captures frozen, which is what the agent waits for. The device comes to rest later,
    // with a limit of its own.
    std::lock_guard<std::mutex> lock(mutex_);
    aborts_.push_back(std::async(std::launch::async, abort_nccl, nccl));
  }
}

void Registry::free_nccl() {
  std::vector<std::future<void>> aborts;
  std::vector<Inner> buried;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    aborts.swap(aborts_);
    const auto first = std::partition(grave_.begin(), grave_.end(), [](const auto& inner) { return !inner.is_nccl; });
    std::move(first, grave_.end(), std::back_inserter(buried));
    grave_.erase(first, grave_.end());
  }
  for (auto& abort : aborts) {
    abort.wait();
  }
  std::vector<BackendPtr> communicators;
  for (const auto& inner : buried) {
    communicators.push_back(inner.communicator);
  }
  abort_nccl(communicators);
}

void Registry::abort_half_built(uint64_t generation) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    const Inodes now = tcp_sockets();
    Inodes sockets;
    bool pending = false;
    for (const Build* build : builds_) {
      if (build->generation_ <= generation && build->pending()) {
        pending = true;
        sockets.merge(new_sockets(*build, now));
      }
    }
    if (!pending) {
      return;
    }
    shutdown_sockets(sockets);
    changed_.wait_for(lock, kRescan);
  }
}

Inodes Registry::new_sockets(const Build& build, const Inodes& now) const {
  Inodes fresh;
  if (!build.has_baseline_) {
    return fresh;
  }
  std::set_difference(
      now.begin(), now.end(), build.baseline_.begin(), build.baseline_.end(), std::inserter(fresh, fresh.end()));
  for (const auto& socket : store_sockets_) {
    fresh.erase(socket.inode);
  }
  return fresh;
}

void Registry::add_store_socket(int fd, uint64_t generation) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (generation <= closed_) {
    throw_aborted("*", generation, "closed while its rendezvous was connected");
  }
  store_sockets_.push_back({fd, socket_inode(fd), generation});
}

void Registry::remove_store_socket(int fd) {
  std::lock_guard<std::mutex> lock(mutex_);
  store_sockets_.erase(
      std::remove_if(store_sockets_.begin(), store_sockets_.end(), [&](const auto& socket) { return socket.fd == fd; }),
      store_sockets_.end());
}

void Registry::add(const c10::intrusive_ptr<SwapBackend>& handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  handles_.erase(
      std::remove_if(handles_.begin(), handles_.end(), [](const auto& known) { return known.expired(); }), handles_.end());
  handles_.emplace_back(handle);
}

std::vector<c10::intrusive_ptr<SwapBackend>> Registry::handles() {
  std::vector<c10::intrusive_ptr<SwapBackend>> live;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& known : handles_) {
      if (auto handle = known.lock()) {
        live.push_back(std::move(handle));
      }
    }
  }
  // Outside the lock: what is dropped here may be the last reference to a handle, whose end takes long and needs the GIL.
  live.erase(std::remove_if(live.begin(), live.end(), [](const auto& handle) { return handle->is_shut_down(); }), live.end());
  return live;
}

void Registry::bury(Inner inner) {
  std::lock_guard<std::mutex> lock(mutex_);
  grave_.push_back(std::move(inner));
}

size_t Registry::reap() {
  std::vector<Inner> released;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    released.swap(grave_);
  }
  return released.size();
}

void Registry::reset_generations() {
  std::lock_guard<std::mutex> lock(mutex_);
  opened_.store(0);
}

Build::Build(uint64_t generation) : generation_(generation) {
  auto& registry = Registry::get();
  std::lock_guard<std::mutex> lock(registry.mutex_);
  if (generation <= registry.closed_) {
    throw_aborted("*", generation, "closed before its communicators were built");
  }
  registry.builds_.push_back(this);
}

Build::~Build() {
  auto& registry = Registry::get();
  std::lock_guard<std::mutex> lock(registry.mutex_);
  auto& builds = registry.builds_;
  builds.erase(std::remove(builds.begin(), builds.end(), this), builds.end());
  registry.changed_.notify_all();
}

void Build::begin(const std::string& handle) {
  auto& registry = Registry::get();
  std::lock_guard<std::mutex> lock(registry.mutex_);
  if (abandoned_ || generation_ <= registry.closed_) {
    throw_aborted(handle, generation_, "closed while its communicator was built");
  }
  baseline_ = tcp_sockets();
  has_baseline_ = true;
}

void Build::install(SwapBackend& handle, BackendPtr communicator) {
  auto& registry = Registry::get();
  Inner late;
  {
    std::lock_guard<std::mutex> lock(registry.mutex_);
    Inner inner{std::move(communicator), registry.new_sockets(*this, tcp_sockets()), handle.is_nccl()};
    has_baseline_ = false;
    if (!abandoned_ && generation_ > registry.closed_) {
      handle.set_inner(std::move(inner), generation_);
      return;
    }
    late = std::move(inner);
  }
  shutdown_sockets(late.sockets);  // NCCL is not connected yet
  registry.bury(std::move(late));
  throw_aborted(handle.name(), generation_, "closed while its communicator was built");
}

void Build::finish(bool succeeded) {
  auto& registry = Registry::get();
  std::lock_guard<std::mutex> lock(registry.mutex_);
  outcome_ = succeeded ? Outcome::kDone : Outcome::kFailed;
  has_baseline_ = false;
  registry.changed_.notify_all();
}

Build::Outcome Build::wait(double timeout_s) {
  auto& registry = Registry::get();
  std::unique_lock<std::mutex> lock(registry.mutex_);
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
  const auto ended = [&] { return outcome_ != Outcome::kRunning; };
  registry.changed_.wait_until(lock, deadline, [&] { return ended() || generation_ <= registry.closed_; });
  if (generation_ > registry.closed_) {
    return outcome_;
  }
  registry.changed_.wait_for(lock, kAbandonGrace, ended);
  if (!ended()) {
    abandoned_ = true;
    registry.changed_.notify_all();
  }
  return Outcome::kClosed;
}

void Build::abandon() {
  auto& registry = Registry::get();
  std::lock_guard<std::mutex> lock(registry.mutex_);
  abandoned_ = true;
  registry.changed_.notify_all();
}

}  // namespace deadpool
