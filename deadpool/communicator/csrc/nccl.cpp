#include "nccl.h"

#include <dlfcn.h>

#include <thread>

namespace deadpool {
namespace {

using Revoke = int (*)(void* communicator, int flags);
constexpr int kRevokeDefault = 0;
constexpr int kSuccess = 0;
constexpr int kInProgress = 7;

// torch has loaded the library by the time a communicator exists; RTLD_NOLOAD never loads a second copy.
Revoke find_revoke() {
  if (void* symbol = dlsym(RTLD_DEFAULT, "ncclCommRevoke")) {
    return reinterpret_cast<Revoke>(symbol);
  }
  void* library = dlopen("libnccl.so.2", RTLD_NOLOAD | RTLD_LAZY);
  return library == nullptr ? nullptr : reinterpret_cast<Revoke>(dlsym(library, "ncclCommRevoke"));
}

}  // namespace

bool revoke_nccl(const std::vector<int64_t>& raw) {
  static const Revoke revoke = find_revoke();
  bool all = revoke != nullptr;
  for (const int64_t address : raw) {
    if (revoke != nullptr && address != 0) {
      const int result = revoke(reinterpret_cast<void*>(address), kRevokeDefault);
      all = all && (result == kSuccess || result == kInProgress);
    } else {
      all = false;
    }
  }
  return all;
}

void abort_nccl(const std::vector<c10::intrusive_ptr<c10d::Backend>>& communicators) {
  std::vector<std::thread> threads;
  for (const auto& communicator : communicators) {
    threads.emplace_back([communicator] {
      try {
        communicator->abort();
      } catch (const std::exception&) {
        // An abort that fails leaves a communicator that nobody uses again. If its kernels run on, the device does not come to
        // rest, and this worker counts as lost.
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
}

}  // namespace deadpool
