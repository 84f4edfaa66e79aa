// The native thread that hears CLOSE from the agent, ticks in the worker page, and ends the process when the agent is gone.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

namespace deadpool {

// Frames on the close channel (SOCK_SEQPACKET): two u64, kind and generation.
constexpr uint64_t kFrameClose = 1;   // agent -> worker: close every handle of generations <= generation
constexpr uint64_t kFrameClosed = 2;  // worker -> agent: closed, captures frozen, inner communicators aborted
constexpr int kExitReplaced = 73;     // deadpool.errors.ExitCode.REPLACED

class Listener {
 public:
  static Listener& get();  // never destroyed

  // Keeps its own duplicate of the descriptor. `close_fd` < 0: goes on with the channel it has, or only ticks. Does nothing
  // when it listens on that channel already; turns to another one otherwise.
  void start(int close_fd);
  void stop();  // joins; harmless when not started, or in a forked child
  bool is_running() const {
    return thread_ != nullptr;
  }

 private:
  void run(int channel);

  std::unique_ptr<std::thread> thread_;
  int wake_fd_ = -1;
  int channel_ = -1;
  int owner_pid_ = 0;
  std::atomic<int> closing_{0};
};

}  // namespace deadpool
