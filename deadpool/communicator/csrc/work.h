// Works handed to callers.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "page.h"

namespace deadpool {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// Forwards everything to `inner`.
class ForwardWork : public c10d::Work {
 public:
  explicit ForwardWork(WorkPtr inner) : Work(-1, inner->retrieveOpType()), inner_(std::move(inner)) {}

  bool isCompleted() override {
    return inner_->isCompleted();
  }
  bool isSuccess() const override {
    return inner_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return inner_->exception();
  }
  int sourceRank() const override {
    return inner_->sourceRank();
  }
  std::vector<at::Tensor> result() override {
    return inner_->result();
  }
  void synchronize() override {
    inner_->synchronize();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    return inner_->wait(timeout);
  }
  void blockCurrentStream() override {
    inner_->blockCurrentStream();
  }
  void abort() override {
    inner_->abort();
  }
  FuturePtr getFuture() override {
    return inner_->getFuture();
  }
  FuturePtr getFutureResult() override {
    return inner_->getFutureResult();
  }
  float getDuration() const override {
    return inner_->getDuration();
  }
  uint64_t getSequencenumber() const override {
    return inner_->getSequencenumber();
  }

 protected:
  const WorkPtr inner_;
};

// [Note: operations that gloo forgets]
// When a connection fails, gloo tells the operations that are queued, but not the one whose bytes are under way: what it sends is
// in Pair::tx_, where signalException looks for bound buffers only, and what it receives has left localPendingRecv_ already. That
// operation's waiter sleeps until the timeout of the group (measured: in 0.7% of aborts, ring all-reduce in
// UnboundBuffer::waitSend). gloo offers no way to reach it from outside. So no caller of ours waits
// inside gloo without end. A wait for a collective sleeps on a Flight, or in slices where there is no future, and ends some time
// after a close; a wait for a send or receive, and futures, are listed as BlockedCalls and made to fail. gloo's own thread stays
// behind until the timeout, in a communicator that is buried; it writes nothing, its connections are gone.

// Whether a gloo collective has ended.
class Flight {
 public:
  explicit Flight(HandleEntry* entry) : entry_(entry) {}

  void end(bool succeeded);
  // Waits until it has ended. False: `timeout` (0: none) passed, or the generation was closed and grace is over.
  bool wait(std::chrono::milliseconds timeout, uint64_t generation);

 private:
  HandleEntry* const entry_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
};

// Calls that somebody is blocked in, each with a way to make it fail.
class BlockedCalls {
 public:
  static BlockedCalls& get();  // never destroyed

  uint64_t add(uint64_t generation, std::function<void()> fail);
  void remove(uint64_t id);
  // After a close: gives those of generations <= `generation` a short grace, then makes them fail.
  void fail_all(uint64_t generation);

 private:
  struct Call {
    uint64_t generation;
    std::function<void()> fail;
  };

  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t next_id_ = 1;
  std::map<uint64_t, Call> calls_;
};

// The work of a live collective: errors after a close become CollectiveAborted, and completion is counted.
class SwapWork final : public ForwardWork {
 public:
  enum class Wait {
    kDirect,  // NCCL: a wait orders streams and does not block
    kFlight,  // a gloo collective with a future, which counts its completion; all others count when waited for or dropped
    kAbortable,  // a gloo send or receive: has an abort() that wakes its waiter
    kSliced,  // a gloo collective without a future
  };

  SwapWork(
      WorkPtr inner,
      std::shared_ptr<const std::string> handle,
      uint64_t generation,
      HandleEntry* entry,
      std::shared_ptr<Flight> flight,
      Wait wait);
  ~SwapWork() override;

  bool isCompleted() override;
  std::exception_ptr exception() const override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  FuturePtr getFuture() override;

 private:
  void count();
  bool wait_flight(std::chrono::milliseconds timeout);
  bool wait_abortable(std::chrono::milliseconds timeout);
  bool wait_in_slices(std::chrono::milliseconds timeout);
  template <class Call>
  auto translated(Call call) const;

  const std::shared_ptr<const std::string> handle_;
  const uint64_t generation_;
  HandleEntry* const entry_;
  const std::shared_ptr<Flight> flight_;
  const Wait wait_;
  std::atomic<bool> counted_;
};

// Calls `done(source_rank)` once, with the GIL, after the inner work succeeded and before its waiter goes on.
// wait() and getFuture() may be called from C++ threads without the GIL.
class WatchedWork final : public ForwardWork {
 public:
  WatchedWork(WorkPtr inner, py::object done);
  ~WatchedWork() override;

  bool isCompleted() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  FuturePtr getFuture() override;

 private:
  void call_done();

  std::atomic<bool> called_{false};
  py::object done_;
};

// A work that is complete from the start: a replayed collective.
class DoneWork final : public c10d::Work {
 public:
  DoneWork(std::vector<at::Tensor> outputs, int source_rank);

  bool isCompleted() override {
    return true;
  }
  bool isSuccess() const override {
    return true;
  }
  int sourceRank() const override {
    return source_rank_;
  }
  std::vector<at::Tensor> result() override {
    return outputs_;
  }
  void synchronize() override {}
  bool wait(std::chrono::milliseconds timeout) override {
    return true;
  }
  void blockCurrentStream() override {}
  FuturePtr getFuture() override {
    return future_;
  }

 private:
  const std::vector<at::Tensor> outputs_;
  const int source_rank_;
  FuturePtr future_;
};

}  // namespace deadpool
