#include "page.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace deadpool {

uint64_t name_hash(const char* name) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (; *name != '\0'; ++name) {
    hash = (hash ^ static_cast<unsigned char>(*name)) * 0x100000001b3ULL;
  }
  return hash;
}

uint64_t encode_call(const char* op, uint64_t bytes) {
  constexpr uint64_t kMostBytes = (1ULL << 48) - 1;
  return name_hash(op) << 48 | std::min(bytes, kMostBytes);
}

WorkerPage& WorkerPage::get() {
  static auto* page = new WorkerPage();
  return *page;
}

WorkerPage::WorkerPage() {
  map(-1);
}

void WorkerPage::map(int fd) {
  const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* memory = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (memory == MAP_FAILED) {
    throw std::runtime_error(std::string("cannot map the worker page: ") + std::strerror(errno));
  }
  base_.store(static_cast<char*>(memory));
  used_ = 0;
}

std::atomic<uint64_t>& WorkerPage::field(size_t offset) {
  return *reinterpret_cast<std::atomic<uint64_t>*>(base_.load() + offset);
}

void WorkerPage::tick() {
  field(kTickOffset).fetch_add(1, std::memory_order_relaxed);
}

void WorkerPage::set_closed_generation(uint64_t generation) {
  field(kClosedGenerationOffset).store(generation);
}

HandleEntry* WorkerPage::add_entry(const std::string& name) {
  const uint64_t index = used_.fetch_add(1);
  if (index >= kMaxEntries) {
    // More groups than the page holds: they work, the agent does not see their counters.
    static auto* spill = new HandleEntry();
    return spill;
  }
  auto* entry = reinterpret_cast<HandleEntry*>(base_.load() + kEntriesOffset) + index;
  entry->issued = 0;
  entry->completed = 0;
  entry->last_call = 0;
  entry->name_hash = name_hash(name.c_str());
  field(kHandleCountOffset).store(index + 1);  // last: the agent reads only entries below the count
  return entry;
}

void WorkerPage::clear_entries() {
  used_ = 0;
  field(kHandleCountOffset).store(0);
  std::memset(base_.load() + kEntriesOffset, 0, kPageBytes - kEntriesOffset);
}

}  // namespace deadpool
