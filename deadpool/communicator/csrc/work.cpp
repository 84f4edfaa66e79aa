#include "work.h"

#include <algorithm>
#include <stdexcept>

#include "errors.h"
#include "registry.h"

namespace deadpool {
namespace {

using Clock = std::chrono::steady_clock;

// An operation that gloo has not forgotten fails within a few milliseconds of a close.
constexpr auto kForgottenGrace = std::chrono::milliseconds(200);
constexpr auto kLookAround = std::chrono::milliseconds(20);
constexpr auto kSlice = std::chrono::milliseconds(100);
constexpr auto kForgotten = "it did not end";
constexpr auto kTimedOut = "Operation timed out!";  // as Work::wait says it

bool is_closed(uint64_t generation) {
  return generation <= Registry::get().closed_generation();
}

std::string aborted_text(const std::string& cause) {
  return "the collective was aborted (" + cause + ")";
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (...) {
    return current_message();
  }
}

std::exception_ptr aborted(const std::string& handle, uint64_t generation, const std::exception_ptr& cause) {
  try {
    throw_aborted(handle, generation, aborted_text(message_of(cause)));
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

void Flight::end(bool succeeded) {
  if (succeeded) {
    entry_->completed.fetch_add(1, std::memory_order_relaxed);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

bool Flight::wait(std::chrono::milliseconds timeout, uint64_t generation) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto begin = Clock::now();
  auto closed_at = Clock::time_point::max();
  while (!ended_) {
    const auto now = Clock::now();
    if (timeout != kNoTimeout && now - begin >= timeout) {
      return false;
    }
    if (closed_at == Clock::time_point::max()) {
      if (is_closed(generation)) {
        closed_at = now;
      }
    } else if (now - closed_at >= kForgottenGrace) {
      return false;
    }
    changed_.wait_for(lock, kLookAround);
  }
  return true;
}

BlockedCalls& BlockedCalls::get() {
  static auto* calls = new BlockedCalls();
  return *calls;
}

uint64_t BlockedCalls::add(uint64_t generation, std::function<void()> fail) {
  std::lock_guard<std::mutex> lock(mutex_);
  calls_.emplace(next_id_, Call{generation, std::move(fail)});
  return next_id_++;
}

void BlockedCalls::remove(uint64_t id) {
  Call removed;  // released outside of the lock
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto found = calls_.find(id); found != calls_.end()) {
    removed = std::move(found->second);
    calls_.erase(found);
    changed_.notify_all();
  }
}

void BlockedCalls::fail_all(uint64_t generation) {
  std::vector<std::function<void()>> stuck;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto is_old = [&](const auto& item) { return item.second.generation <= generation; };
    changed_.wait_for(lock, kForgottenGrace, [&] { return std::none_of(calls_.begin(), calls_.end(), is_old); });
    for (const auto& item : calls_) {
      if (is_old(item)) {
        stuck.push_back(item.second.fail);
      }
    }
  }
  for (const auto& fail : stuck) {
    fail();
  }
}

SwapWork::SwapWork(
    WorkPtr inner,
    std::shared_ptr<const std::string> handle,
    uint64_t generation,
    HandleEntry* entry,
    std::shared_ptr<Flight> flight,
    Wait wait)
    : ForwardWork(std::move(inner)),
      handle_(std::move(handle)),
      generation_(generation),
      entry_(entry),
      flight_(std::move(flight)),
      wait_(wait),
      counted_(flight_ != nullptr) {}

SwapWork::~SwapWork() {
  // Dropped without a wait: nobody waits for it any more. After a close it says nothing about its peers.
  if (!is_closed(generation_)) {
    count();
  }
}

void SwapWork::count() {
  if (!counted_.exchange(true)) {
    entry_->completed.fetch_add(1, std::memory_order_relaxed);
  }
}

template <class Call>
auto SwapWork::translated(Call call) const {
  try {
    return call();
  } catch (const CollectiveAborted&) {
    throw;
  } catch (...) {
    if (is_closed(generation_)) {
      throw_aborted(*handle_, generation_, aborted_text(current_message()));
    }
    throw;
  }
}

bool SwapWork::isCompleted() {
  const bool completed = inner_->isCompleted();
  if (completed && inner_->isSuccess()) {
    count();
  }
  return completed;
}

std::exception_ptr SwapWork::exception() const {
  auto error = inner_->exception();
  return error && is_closed(generation_) ? aborted(*handle_, generation_, error) : error;
}

void SwapWork::synchronize() {
  translated([&] { inner_->synchronize(); });
}

bool SwapWork::wait(std::chrono::milliseconds timeout) {
  const bool succeeded = translated([&] {
    switch (wait_) {
      case Wait::kFlight:
        return wait_flight(timeout);
      case Wait::kAbortable:
        return wait_abortable(timeout);
      case Wait::kSliced:
        return wait_in_slices(timeout);
      case Wait::kDirect:
        break;
    }
    return inner_->wait(timeout);
  });
  if (succeeded) {
    count();
  }
  return succeeded;
}

bool SwapWork::wait_flight(std::chrono::milliseconds timeout) {
  const bool ended = flight_->wait(timeout, generation_);
  TORCH_CHECK(ended, is_closed(generation_) ? kForgotten : kTimedOut);
  return inner_->wait(timeout);
}

bool SwapWork::wait_abortable(std::chrono::milliseconds timeout) {
  auto& blocked = BlockedCalls::get();
  const uint64_t id = blocked.add(generation_, [inner = inner_] { inner->abort(); });
  struct Leave {
    BlockedCalls& blocked;
    uint64_t id;
    ~Leave() {
      blocked.remove(id);
    }
  } leave{blocked, id};
  if (is_closed(generation_)) {
    inner_->abort();  // whoever closed may have looked at the list before
  }
  const bool succeeded = inner_->wait(timeout);
  TORCH_CHECK(succeeded || !is_closed(generation_), kForgotten);
  return succeeded;
}

bool SwapWork::wait_in_slices(std::chrono::milliseconds timeout) {
  const auto begin = Clock::now();
  auto closed_at = Clock::time_point::max();
  while (true) {
    try {
      return inner_->wait(kSlice);  // a timeout of Work::wait changes nothing: it can be waited for again
    } catch (const std::exception& error) {
      if (std::string(error.what()).find(kTimedOut) == std::string::npos) {
        throw;
      }
    }
    const auto now = Clock::now();
    TORCH_CHECK(timeout == kNoTimeout || now - begin < timeout, kTimedOut);
    if (is_closed(generation_) && closed_at == Clock::time_point::max()) {
      closed_at = now;
    }
    TORCH_CHECK(closed_at == Clock::time_point::max() || now - closed_at < kForgottenGrace, kForgotten);
  }
}

FuturePtr SwapWork::getFuture() {
  FuturePtr inner = inner_->getFuture();
  if (!inner->devices().empty() || (inner->completed() && !inner->hasError())) {
    return inner;  // NCCL's futures carry events and never an error of the collective
  }
  auto outer = c10::make_intrusive<c10::ivalue::Future>(inner->elementType());
  // Two may want to complete it, the operation and a close: the first one does.
  auto taken = std::make_shared<std::atomic<bool>>(false);
  const std::function<void()> fail = [outer, taken, handle = handle_, generation = generation_] {
    if (!taken->exchange(true)) {
      const auto cause = std::make_exception_ptr(std::runtime_error(kForgotten));
      outer->setError(aborted(*handle, generation, cause));
    }
  };
  const uint64_t id = BlockedCalls::get().add(generation_, fail);
  inner->addCallback(
      [outer, taken, id, handle = handle_, generation = generation_](c10::ivalue::Future& ended) {
        BlockedCalls::get().remove(id);
        if (taken->exchange(true)) {
          return;
        }
        if (!ended.hasError()) {
          outer->markCompleted(ended.value());
        } else if (is_closed(generation)) {
          outer->setError(aborted(*handle, generation, ended.exception_ptr()));
        } else {
          outer->setError(ended.exception_ptr());
        }
      },
      /*uses_future=*/false);
  if (is_closed(generation_) && !inner->completed()) {
    fail();  // whoever closed may have looked at the list before
  }
  return outer;
}

WatchedWork::WatchedWork(WorkPtr inner, py::object done) : ForwardWork(std::move(inner)), done_(std::move(done)) {}

WatchedWork::~WatchedWork() {
  if (done_) {
    py::gil_scoped_acquire gil;
    done_ = py::object();
  }
}

void WatchedWork::call_done() {
  if (called_.exchange(true)) {
    return;
  }
  const bool has_source = retrieveOpType() == c10d::OpType::RECVANYSOURCE;
  py::gil_scoped_acquire gil;
  const py::object done = std::move(done_);
  done(has_source ? inner_->sourceRank() : -1);
}

bool WatchedWork::isCompleted() {
  const bool completed = inner_->isCompleted();
  if (completed && inner_->isSuccess()) {
    call_done();
  }
  return completed;
}

void WatchedWork::synchronize() {
  inner_->synchronize();
  call_done();
}

bool WatchedWork::wait(std::chrono::milliseconds timeout) {
  const bool succeeded = inner_->wait(timeout);
  if (succeeded) {
    call_done();
  }
  return succeeded;
}

FuturePtr WatchedWork::getFuture() {
  if (PyGILState_Check()) {
    py::gil_scoped_release no_gil;
    wait(kNoTimeout);
  } else {
    wait(kNoTimeout);
  }
  return inner_->getFuture();
}

DoneWork::DoneWork(std::vector<at::Tensor> outputs, int source_rank)
    : outputs_(std::move(outputs)),
      source_rank_(source_rank),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {
  future_->markCompleted(c10::IValue(outputs_));
}

}  // namespace deadpool
