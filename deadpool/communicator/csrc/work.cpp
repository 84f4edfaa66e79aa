#include "work.h"

#include "errors.h"
#include "registry.h"

namespace deadpool {
namespace {

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

SwapWork::SwapWork(
    WorkPtr inner,
    std::shared_ptr<const std::string> handle,
    uint64_t generation,
    HandleEntry* entry,
    bool counted_elsewhere)
    : ForwardWork(std::move(inner)),
      handle_(std::move(handle)),
      generation_(generation),
      entry_(entry),
      counted_(counted_elsewhere) {}

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
  const bool succeeded = translated([&] { return inner_->wait(timeout); });
  if (succeeded) {
    count();
  }
  return succeeded;
}

FuturePtr SwapWork::getFuture() {
  FuturePtr inner = inner_->getFuture();
  if (!inner->devices().empty() || (inner->completed() && !inner->hasError())) {
    return inner;  // NCCL's futures carry events and never an error of the collective
  }
  auto outer = c10::make_intrusive<c10::ivalue::Future>(inner->elementType());
  inner->addCallback(
      [outer, handle = handle_, generation = generation_](c10::ivalue::Future& ended) {
        if (!ended.hasError()) {
          outer->markCompleted(ended.value());
        } else if (is_closed(generation)) {
          outer->setError(aborted(*handle, generation, ended.exception_ptr()));
        } else {
          outer->setError(ended.exception_ptr());
        }
      },
      /*uses_future=*/false);
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
