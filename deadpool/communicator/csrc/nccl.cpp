#include "nccl.h"

#include <dlfcn.h>

namespace deadpool {
namespace {

using GroupCall = int (*)();

// torch has loaded the library by the time a communicator exists; RTLD_NOLOAD never loads a second copy.
GroupCall find_group_call(const char* name) {
  if (void* symbol = dlsym(RTLD_DEFAULT, name)) {
    return reinterpret_cast<GroupCall>(symbol);
  }
  void* library = dlopen("libnccl.so.2", RTLD_NOLOAD | RTLD_LAZY);
  return library == nullptr ? nullptr : reinterpret_cast<GroupCall>(dlsym(library, name));
}

}  // namespace

void abort_nccl(const std::vector<c10::intrusive_ptr<c10d::Backend>>& communicators) {
  if (communicators.empty()) {
    return;
  }
  static const GroupCall group_start = find_group_call("ncclGroupStart");
  static const GroupCall group_end = find_group_call("ncclGroupEnd");
  const bool grouped = group_start != nullptr && group_end != nullptr;
  if (grouped) {
    group_start();
  }
  for (const auto& communicator : communicators) {
    try {
      communicator->abort();
    } catch (const std::exception&) {
      // An abort that fails leaves a communicator that nobody uses again; the others must still be aborted.
    }
  }
  if (grouped) {
    group_end();
  }
}

}  // namespace deadpool
