// Works handed to callers.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <memory>
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

// The work of a live collective: errors after a close become CollectiveAborted, and completion is counted.
class SwapWork final : public ForwardWork {
 public:
  // `counted_elsewhere`: a callback on the inner future counts.
  SwapWork(
      WorkPtr inner,
      std::shared_ptr<const std::string> handle,
      uint64_t generation,
      HandleEntry* entry,
      bool counted_elsewhere);
  ~SwapWork() override;

  bool isCompleted() override;
  std::exception_ptr exception() const override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  FuturePtr getFuture() override;

 private:
  void count();
  template <class Call>
  auto translated(Call call) const;

  const std::shared_ptr<const std::string> handle_;
  const uint64_t generation_;
  HandleEntry* const entry_;
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
