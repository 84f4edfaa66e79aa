// Ending NCCL communicators without linking against NCCL: this file compiles on a CPU build of torch.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <vector>

namespace deadpool {

// Raises the abort flags of raw communicators (ncclComm_t) and frees nothing: ncclCommRevoke, NCCL 2.29. Their kernels end,
// while peers on the same host may still read their memory. False where that is not possible: no such call, or an address of 0.
bool revoke_nccl(const std::vector<int64_t>& raw);

// Aborts and frees all of them at the same time; harmless for those that were aborted before.
//
// [Note: one thread per abort]
// One after the other they deadlock: the abort of one waits for a kernel that waits for another one (nccl#1013,
// pytorch#119797). A group of NCCL calls around them would not help: ProcessGroupNCCL::abort does its work on a thread of its
// own, and NCCL keeps groups per thread. Each abort raises its flags before it waits, so at the same time none waits for ever.
void abort_nccl(const std::vector<c10::intrusive_ptr<c10d::Backend>>& communicators);

}  // namespace deadpool
