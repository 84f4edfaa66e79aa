// All handles of this process, the generation they belong to, and the one door by which they are closed.
//
// Lock order: Registry::mutex_ before SwapBackend's own. Nothing here touches Python, so a held GIL delays nothing.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "sockets.h"

namespace deadpool {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
class SwapBackend;

// An inner communicator and what is needed to abort it.
struct Inner {
  BackendPtr communicator;
  Inodes sockets;  // gloo only
  bool is_nccl = false;
  int64_t nccl_raw = 0;  // ncclComm_t, once connected and if torch tells
};

// One attempt to build inner communicators under one generation. A build runs on a thread of its own, because gloo's
// constructor cannot always be interrupted: a rank that waits for a peer's connection owns no socket that could be shut
// down. Its owner then abandons it; what it produces afterwards is buried unused.
class Build {
 public:
  enum class Outcome { kRunning, kDone, kFailed, kClosed };

  explicit Build(uint64_t generation);
  ~Build();
  Build(const Build&) = delete;
  Build& operator=(const Build&) = delete;

  // Before each constructor of an inner communicator; throws CollectiveAborted when closed. TCP sockets that appear from now
  // until install() count as that communicator's: one that another thread of the script opens in these milliseconds would be
  // shut down with it, which its owner sees as a lost connection.
  void begin(const std::string& handle);
  void install(SwapBackend& handle, BackendPtr communicator);
  void finish(bool succeeded);

  // Waits at most `timeout_s`. After a close the build gets a short grace to end by itself, then is abandoned.
  Outcome wait(double timeout_s);
  void abandon();

  uint64_t generation() const {
    return generation_;
  }

 private:
  friend class Registry;
  bool pending() const {
    return outcome_ == Outcome::kRunning && !abandoned_;
  }

  const uint64_t generation_;
  // All below: Registry::mutex_.
  Outcome outcome_ = Outcome::kRunning;
  bool abandoned_ = false;
  bool has_baseline_ = false;
  Inodes baseline_;
};

class Registry {
 public:
  static Registry& get();  // never destroyed

  uint64_t closed_generation() const {
    return closed_.load(std::memory_order_acquire);
  }
  uint64_t opened_generation() const {
    return opened_.load(std::memory_order_acquire);
  }
  bool is_closed() const {
    return closed_generation() >= opened_generation();
  }

  // Declares the generation under which handles are built from now on; throws CollectiveAborted if it is closed already.
  void open(uint64_t generation);

  // Closes every handle of generations <= `generation`, in this order: new calls raise, captures freeze, inner communicators
  // (half-built ones too) are aborted. Returns when no build of these generations is pending.
  void close(uint64_t generation);

  // A rendezvous client's socket: excluded from what communicators own, and shut down at close so that its waits break.
  void add_store_socket(int fd, uint64_t generation);
  void remove_store_socket(int fd);

  void add(const c10::intrusive_ptr<SwapBackend>& handle);
  std::vector<c10::intrusive_ptr<SwapBackend>> handles();  // alive and not shut down, in creation order

  void bury(Inner inner);
  size_t reap();  // releases aborted communicators; joins gloo's threads, so it may take long

  // Aborts what was only revoked, and releases all NCCL communicators of closed generations: their device memory is free when
  // it returns. Call it when all ranks of this host are known to have closed, and before new communicators are made.
  void free_nccl();

  // For a process that starts over as another rank (the throw-away build).
  void reset_generations();

 private:
  friend class Build;
  struct StoreSocket {
    int fd;
    ino_t inode;  // the number alone may have been closed and used again
    uint64_t generation;
  };

  Inodes new_sockets(const Build& build, const Inodes& now) const;
  void abort_built(uint64_t generation);
  void abort_half_built(uint64_t generation);

  std::atomic<uint64_t> closed_{0};
  std::atomic<uint64_t> opened_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<c10::weak_intrusive_ptr<SwapBackend>> handles_;
  std::vector<Build*> builds_;
  std::vector<StoreSocket> store_sockets_;
  std::vector<Inner> grave_;
  std::vector<std::future<void>> aborts_;
};

}  // namespace deadpool
