// SwapBackend: what a framework's ProcessGroup holds for ever, over an inner communicator that is replaced.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "page.h"
#include "registry.h"
#include "work.h"

namespace deadpool {

using TensorList = std::vector<at::Tensor>;
using TensorLists = std::vector<TensorList>;

// Python's view of calls, only while recording, replaying or injecting. Normal running has none and enters no Python.
// Called as tap(handle, op, outputs, inputs, root, issue) -> Work | None; `issue()` runs the inner collective.
struct Tap {
  explicit Tap(py::object callable) : callable(std::move(callable)) {}
  ~Tap();
  Tap(const Tap&) = delete;
  Tap& operator=(const Tap&) = delete;
  py::object callable;
};

// Fixed (rank, size, kind, name); registered as CUSTOM under a stock ProcessGroup. Never as GLOO: DDP's logger casts a GLOO
// backend to ProcessGroupGloo.
class SwapBackend : public c10d::Backend {
 public:
  SwapBackend(int rank, int size, std::string kind, c10::intrusive_ptr<Options> options);

  const std::string& name() const {
    return *name_;
  }
  const std::string& kind() const {
    return kind_;
  }
  bool is_nccl() const {
    return kind_ == "nccl";
  }
  // Once, before it is built.
  void set_name(const std::string& name);

  void set_inner(Inner inner, uint64_t generation);
  void set_nccl_raw(int64_t address);  // of the inner communicator, once it is connected
  Inner take_inner(uint64_t generation);  // if it is of that generation or older
  BackendPtr peek_inner() const;
  uint64_t generation() const {
    return generation_.load(std::memory_order_acquire);
  }
  bool is_shut_down() const {
    return shut_down_.load(std::memory_order_acquire);
  }
  void set_tap(py::object callable);  // None clears
  uint64_t issued() const;
  uint64_t completed() const;

  bool supportsCoalescing() const override {
    return is_nccl();
  }
  const std::string getBackendName() const override {
    return kind_;
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return options_;
  }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  WorkPtr broadcast(TensorList& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(TensorList& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(TensorList& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(TensorList& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(TensorList& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, TensorList& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, TensorList& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(
      TensorList& outputs,
      TensorList& inputs,
      const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, TensorList& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(TensorList& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(TensorList& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      TensorList& outputs,
      TensorList& inputs,
      const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(TensorList& outputs, TensorList& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr send(TensorList& tensors, int destination, int tag) override;
  WorkPtr recv(TensorList& tensors, int source, int tag) override;
  WorkPtr recvAnysource(TensorList& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  void setSequenceNumberForGroup() override {}  // done for each inner communicator when it is built
  uint64_t getSequenceNumberForGroup() override;
  void waitForPendingWorks() override;
  void enableCollectivesTiming() override;
  void eagerConnectSingleDevice(at::Device device) override;
  c10d::ErrorType getError() override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  // Nobody but DeadPool aborts (DESIGN 6): a framework's abort closes nothing here.
  void abort() override {}
  void shutdown() override;
  void release_resources() override;

 private:
  BackendPtr live(uint64_t& generation) const;
  BackendPtr live() const;
  WorkPtr track(const char* op, const BackendPtr& inner, uint64_t generation, WorkPtr work, HandleEntry* entry);
  template <class Outputs, class Inputs, class Run>
  WorkPtr dispatch(const char* op, int root, Outputs& outputs, Inputs& inputs, Run run);
  template <class Run>
  WorkPtr run_inner(const char* op, int root, uint64_t bytes, Run& run);
  HandleEntry* entry_for(const char* op, int peer);

  const std::string kind_;
  const c10::intrusive_ptr<Options> options_;
  std::shared_ptr<const std::string> name_;
  HandleEntry* entry_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<bool> shut_down_{false};
  std::atomic<bool> tapped_{false};
  mutable std::mutex mutex_;
  // Below: mutex_.
  Inner inner_;
  std::shared_ptr<Tap> tap_;
  std::map<std::pair<int, int>, HandleEntry*> lines_;  // (sender, receiver), see entry_for
};

}  // namespace deadpool
