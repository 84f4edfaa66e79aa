#include "backend.h"

#include <cstring>

#include "errors.h"

namespace deadpool {
namespace {

// How arguments of every shape are counted and flattened for the tap.
struct NoTensors {};
NoTensors none;

uint64_t count_bytes(const NoTensors&) {
  return 0;
}
uint64_t count_bytes(const at::Tensor& tensor) {
  return tensor.nbytes();
}
template <class T>
uint64_t count_bytes(const std::vector<T>& items) {
  uint64_t bytes = 0;
  for (const auto& item : items) {
    bytes += count_bytes(item);
  }
  return bytes;
}

void flatten(const NoTensors&, TensorList&) {}
void flatten(const at::Tensor& tensor, TensorList& flat) {
  flat.push_back(tensor);
}
template <class T>
void flatten(const std::vector<T>& items, TensorList& flat) {
  for (const auto& item : items) {
    flatten(item, flat);
  }
}
template <class T>
TensorList flat(const T& items) {
  TensorList list;
  flatten(items, list);
  return list;
}

constexpr int kNoRoot = -1;

// For operations of which members do not issue equally many: comparing them would name the wrong rank.
HandleEntry* uncounted() {
  static auto* entry = new HandleEntry();
  return entry;
}

bool is_point_to_point(const char* op) {
  return op[0] == 's' ? op[1] == 'e' : op[0] == 'r' && op[2] == 'c';  // send; recv, recv_anysource
}

// The future of a gloo work, or null. Asking a work that has none throws, which is slow, so ask only where there may be one
// (reduce-scatter has none in torch 2.13).
FuturePtr find_future(const char* op, c10d::Work& work) {
  if (is_point_to_point(op) || std::strncmp(op, "reduce_scatter", std::strlen("reduce_scatter")) == 0) {
    return nullptr;
  }
  try {
    return work.getFuture();
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace

Tap::~Tap() {
  py::gil_scoped_acquire gil;
  callable = py::object();
}

SwapBackend::SwapBackend(int rank, int size, std::string kind, c10::intrusive_ptr<Options> options)
    : Backend(rank, size),
      kind_(std::move(kind)),
      options_(std::move(options)),
      name_(std::make_shared<const std::string>("unnamed")),
      entry_(nullptr) {}

void SwapBackend::set_name(const std::string& name) {
  name_ = std::make_shared<const std::string>(name);
  entry_ = WorkerPage::get().add_entry(name);
}

void SwapBackend::set_inner(Inner inner, uint64_t generation) {
  inner.communicator->setGroupUid(getGroupUid());
  inner.communicator->setGroupDesc(getGroupDesc());
  if (getBoundDeviceId()) {
    inner.communicator->setBoundDeviceId(getBoundDeviceId());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  std::swap(inner_, inner);
  if (entry_ != nullptr) {
    // Counted anew in each generation: a promoted spare has issued less than the survivors in all.
    entry_->issued.store(0);
    entry_->completed.store(0);
  }
  for (const auto& line : lines_) {
    line.second->issued.store(0);
    line.second->completed.store(0);
  }
  generation_.store(generation, std::memory_order_release);
}

void SwapBackend::set_nccl_raw(int64_t address) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (inner_.communicator) {
    inner_.nccl_raw = address;
  }
}

Inner SwapBackend::take_inner(uint64_t generation) {
  std::lock_guard<std::mutex> lock(mutex_);
  Inner taken;
  if (generation_ <= generation) {
    std::swap(taken, inner_);
  }
  return taken;
}

BackendPtr SwapBackend::peek_inner() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return inner_.communicator;
}

void SwapBackend::set_tap(py::object callable) {
  std::shared_ptr<Tap> tap = callable.is_none() ? nullptr : std::make_shared<Tap>(std::move(callable));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::swap(tap_, tap);
    tapped_.store(tap_ != nullptr, std::memory_order_release);
  }
}

uint64_t SwapBackend::issued() const {
  return entry_ == nullptr ? 0 : entry_->issued.load();
}

uint64_t SwapBackend::completed() const {
  return entry_ == nullptr ? 0 : entry_->completed.load();
}

BackendPtr SwapBackend::live(uint64_t& generation) const {
  BackendPtr inner;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    inner = inner_.communicator;
    generation = generation_.load(std::memory_order_relaxed);
  }
  if (generation <= Registry::get().closed_generation() || !inner) {
    throw_aborted(name(), generation, generation == 0 ? "not connected yet" : "closed");
  }
  return inner;
}

BackendPtr SwapBackend::live() const {
  uint64_t generation = 0;
  return live(generation);
}

// Where an operation is counted. Collectives are counted alike on all members. Sends and receives are not (an inner stage of a
// pipeline issues twice as many as its ends), but on each line from one rank to another both sides count the same: so a line
// has an entry of its own, and whoever has issued less on it is waited for. A receive from any rank belongs to no line.
HandleEntry* SwapBackend::entry_for(const char* op, int peer) {
  if (!is_point_to_point(op)) {
    return entry_;
  }
  if (peer < 0) {
    return uncounted();
  }
  const auto line = op[0] == 's' ? std::make_pair(getRank(), peer) : std::make_pair(peer, getRank());
  std::lock_guard<std::mutex> lock(mutex_);
  HandleEntry*& entry = lines_[line];
  if (entry == nullptr) {
    entry = WorkerPage::get().add_entry(name() + "/" + std::to_string(line.first) + ">" + std::to_string(line.second));
  }
  return entry;
}

WorkPtr SwapBackend::track(
    const char* op,
    const BackendPtr& inner,
    uint64_t generation,
    WorkPtr work,
    HandleEntry* entry) {
  if (!work) {
    entry->completed.fetch_add(1, std::memory_order_relaxed);
    return work;
  }
  std::shared_ptr<Flight> flight;
  SwapWork::Wait wait = SwapWork::Wait::kDirect;
  if (!is_nccl()) {
    const FuturePtr future = find_future(op, *work);
    if (future) {
      wait = SwapWork::Wait::kFlight;
      flight = std::make_shared<Flight>(entry);
      future->addCallback(
          [flight](c10::ivalue::Future& ended) { flight->end(!ended.hasError()); }, /*uses_future=*/false);
    } else {
      wait = is_point_to_point(op) ? SwapWork::Wait::kAbortable : SwapWork::Wait::kSliced;
    }
  }
  return c10::make_intrusive<SwapWork>(std::move(work), name_, generation, entry, std::move(flight), wait);
}

template <class Run>
WorkPtr SwapBackend::run_inner(const char* op, int root, uint64_t bytes, Run& run) {
  uint64_t generation = 0;
  const BackendPtr inner = live(generation);
  HandleEntry* const entry = entry_for(op, root);
  entry->last_call.store(encode_call(op, bytes), std::memory_order_relaxed);
  entry->issued.fetch_add(1, std::memory_order_relaxed);
  try {
    return track(op, inner, generation, run(*inner), entry);
  } catch (...) {
    if (generation <= Registry::get().closed_generation()) {
      throw_aborted(name(), generation, std::string(op) + " was aborted (" + current_message() + ")");
    }
    throw;
  }
}

template <class Outputs, class Inputs, class Run>
WorkPtr SwapBackend::dispatch(const char* op, int root, Outputs& outputs, Inputs& inputs, Run run) {
  const uint64_t bytes = std::max(count_bytes(outputs), count_bytes(inputs));
  if (C10_LIKELY(!tapped_.load(std::memory_order_acquire))) {
    return run_inner(op, root, bytes, run);
  }
  std::shared_ptr<Tap> tap;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tap = tap_;
  }
  if (!tap) {
    return run_inner(op, root, bytes, run);
  }
  py::gil_scoped_acquire gil;
  auto in_call = std::make_shared<bool>(true);  // the arguments are references: `issue` ends with this call
  py::cpp_function issue([&, in_call]() -> std::optional<WorkPtr> {
    TORCH_CHECK(*in_call, "issue() called after its collective returned");
    py::gil_scoped_release no_gil;
    WorkPtr work = run_inner(op, root, bytes, run);
    return work ? std::optional<WorkPtr>(work) : std::nullopt;
  });
  struct End {
    bool& flag;
    ~End() {
      flag = false;
    }
  } end{*in_call};
  const py::object work = tap->callable(name(), op, flat(outputs), flat(inputs), root, issue);
  return work.is_none() ? WorkPtr() : work.cast<WorkPtr>();
}

WorkPtr SwapBackend::broadcast(TensorList& tensors, const c10d::BroadcastOptions& opts) {
  return dispatch("broadcast", static_cast<int>(opts.rootRank), tensors, none, [&](Backend& inner) {
    return inner.broadcast(tensors, opts);
  });
}

WorkPtr SwapBackend::allreduce(TensorList& tensors, const c10d::AllreduceOptions& opts) {
  return dispatch("allreduce", kNoRoot, tensors, tensors, [&](Backend& inner) { return inner.allreduce(tensors, opts); });
}

WorkPtr SwapBackend::allreduce_sparse(TensorList& tensors, const c10d::AllreduceOptions& opts) {
  return dispatch("allreduce_sparse", kNoRoot, tensors, tensors, [&](Backend& inner) {
    return inner.allreduce_sparse(tensors, opts);
  });
}

WorkPtr SwapBackend::allreduce_coalesced(TensorList& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  return dispatch("allreduce_coalesced", kNoRoot, tensors, tensors, [&](Backend& inner) {
    return inner.allreduce_coalesced(tensors, opts);
  });
}

WorkPtr SwapBackend::reduce(TensorList& tensors, const c10d::ReduceOptions& opts) {
  return dispatch("reduce", static_cast<int>(opts.rootRank), tensors, tensors, [&](Backend& inner) {
    return inner.reduce(tensors, opts);
  });
}

WorkPtr SwapBackend::allgather(TensorLists& outputs, TensorList& inputs, const c10d::AllgatherOptions& opts) {
  return dispatch("allgather", kNoRoot, outputs, inputs, [&](Backend& inner) {
    return inner.allgather(outputs, inputs, opts);
  });
}

WorkPtr SwapBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  return dispatch("all_gather_base", kNoRoot, output, input, [&](Backend& inner) {
    return inner._allgather_base(output, input, opts);
  });
}

WorkPtr SwapBackend::allgather_coalesced(
    TensorLists& outputs,
    TensorList& inputs,
    const c10d::AllgatherOptions& opts) {
  return dispatch("allgather_coalesced", kNoRoot, outputs, inputs, [&](Backend& inner) {
    return inner.allgather_coalesced(outputs, inputs, opts);
  });
}

WorkPtr SwapBackend::allgather_into_tensor_coalesced(
    TensorList& outputs,
    TensorList& inputs,
    const c10d::AllgatherOptions& opts) {
  return dispatch("allgather_into_tensor_coalesced", kNoRoot, outputs, inputs, [&](Backend& inner) {
    return inner.allgather_into_tensor_coalesced(outputs, inputs, opts);
  });
}

WorkPtr SwapBackend::gather(TensorLists& outputs, TensorList& inputs, const c10d::GatherOptions& opts) {
  return dispatch("gather", static_cast<int>(opts.rootRank), outputs, inputs, [&](Backend& inner) {
    return inner.gather(outputs, inputs, opts);
  });
}

WorkPtr SwapBackend::scatter(TensorList& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) {
  return dispatch("scatter", static_cast<int>(opts.rootRank), outputs, inputs, [&](Backend& inner) {
    return inner.scatter(outputs, inputs, opts);
  });
}

WorkPtr SwapBackend::reduce_scatter(TensorList& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) {
  return dispatch("reduce_scatter", kNoRoot, outputs, inputs, [&](Backend& inner) {
    return inner.reduce_scatter(outputs, inputs, opts);
  });
}

WorkPtr SwapBackend::_reduce_scatter_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::ReduceScatterOptions& opts) {
  return dispatch("reduce_scatter_base", kNoRoot, output, input, [&](Backend& inner) {
    return inner._reduce_scatter_base(output, input, opts);
  });
}

WorkPtr SwapBackend::reduce_scatter_tensor_coalesced(
    TensorList& outputs,
    TensorList& inputs,
    const c10d::ReduceScatterOptions& opts) {
  return dispatch("reduce_scatter_tensor_coalesced", kNoRoot, outputs, inputs, [&](Backend& inner) {
    return inner.reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  });
}

WorkPtr SwapBackend::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& opts) {
  return dispatch("alltoall_base", kNoRoot, output, input, [&](Backend& inner) {
    return inner.alltoall_base(output, input, output_splits, input_splits, opts);
  });
}

WorkPtr SwapBackend::alltoall(TensorList& outputs, TensorList& inputs, const c10d::AllToAllOptions& opts) {
  return dispatch("alltoall", kNoRoot, outputs, inputs, [&](Backend& inner) {
    return inner.alltoall(outputs, inputs, opts);
  });
}

WorkPtr SwapBackend::send(TensorList& tensors, int destination, int tag) {
  return dispatch("send", destination, none, tensors, [&](Backend& inner) {
    return inner.send(tensors, destination, tag);
  });
}

WorkPtr SwapBackend::recv(TensorList& tensors, int source, int tag) {
  return dispatch("recv", source, tensors, none, [&](Backend& inner) { return inner.recv(tensors, source, tag); });
}

WorkPtr SwapBackend::recvAnysource(TensorList& tensors, int tag) {
  return dispatch("recv_anysource", kNoRoot, tensors, none, [&](Backend& inner) {
    return inner.recvAnysource(tensors, tag);
  });
}

WorkPtr SwapBackend::barrier(const c10d::BarrierOptions& opts) {
  return dispatch("barrier", kNoRoot, none, none, [&](Backend& inner) { return inner.barrier(opts); });
}

void SwapBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  dispatch("monitored_barrier", kNoRoot, none, none, [&](Backend& inner) {
    inner.monitoredBarrier(opts, wait_all_ranks);
    return WorkPtr();
  });
}

void SwapBackend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  if (const auto inner = peek_inner()) {
    inner->setTimeout(timeout);
  }
}

void SwapBackend::startCoalescing() {
  live()->startCoalescing();
}

WorkPtr SwapBackend::endCoalescing() {
  uint64_t generation = 0;
  const BackendPtr inner = live(generation);
  return track("coalesced", inner, generation, inner->endCoalescing(), uncounted());
}

uint64_t SwapBackend::getSequenceNumberForGroup() {
  const auto inner = peek_inner();
  return inner ? inner->getSequenceNumberForGroup() : 0;
}

void SwapBackend::waitForPendingWorks() {
  live()->waitForPendingWorks();
}

void SwapBackend::enableCollectivesTiming() {
  if (const auto inner = peek_inner()) {
    inner->enableCollectivesTiming();
  }
}

void SwapBackend::eagerConnectSingleDevice(at::Device device) {
  live()->eagerConnectSingleDevice(device);
}

c10d::ErrorType SwapBackend::getError() {
  return live()->getError();
}

std::shared_ptr<c10::Allocator> SwapBackend::getMemAllocator() {
  return live()->getMemAllocator();
}

at::Tensor SwapBackend::allocateTensor(long size, at::TensorOptions options) {
  return live()->allocateTensor(size, options);
}

bool SwapBackend::supportsTensorAlloc(c10::DeviceIndex device) {
  const auto inner = peek_inner();
  return inner && inner->supportsTensorAlloc(device);
}

void SwapBackend::shutdown() {
  shut_down_.store(true, std::memory_order_release);
  if (const auto inner = peek_inner()) {
    inner->shutdown();
  }
}

void SwapBackend::release_resources() {
  // The last owner is gone (the registry holds only weak references): release the communicator like a stock group would.
  inner_ = Inner();
  tap_.reset();
}

}  // namespace deadpool
