// Abort of NCCL communicators without linking against NCCL: this file compiles on a CPU build of torch.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <vector>

namespace deadpool {

// Aborts all of them inside one NCCL group. One by one they deadlock: the abort of one waits for a kernel of another
// (nccl#1013, pytorch#119797).
void abort_nccl(const std::vector<c10::intrusive_ptr<c10d::Backend>>& communicators);

}  // namespace deadpool
