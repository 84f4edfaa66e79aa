// The worker page: 64 KiB shared with the agent, little-endian u64 fields. See docs of the runtime for the whole layout;
// this extension writes only `tick`, `closed_generation`, `handle_count` and the handle entries.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace deadpool {

constexpr size_t kPageBytes = 65536;
constexpr size_t kTickOffset = 8;
constexpr size_t kClosedGenerationOffset = 16;
constexpr size_t kHandleCountOffset = 72;
constexpr size_t kEntriesOffset = 4096;

// One per handle, and one per line from rank to rank (see SwapBackend::entry_for); counted anew in each generation. The agent compares `issued` across ranks to name the one
// that others wait for.
struct HandleEntry {
  std::atomic<uint64_t> name_hash;
  std::atomic<uint64_t> issued;
  std::atomic<uint64_t> completed;
  std::atomic<uint64_t> last_call;  // of the newest collective: 16 bits of its operation's name_hash, 48 of bytes
};
static_assert(sizeof(HandleEntry) == 32);
constexpr size_t kMaxEntries = (kPageBytes - kEntriesOffset) / sizeof(HandleEntry);

uint64_t name_hash(const char* name);  // FNV-1a, 64 bits
uint64_t encode_call(const char* op, uint64_t bytes);

class WorkerPage {
 public:
  static WorkerPage& get();  // never destroyed: works and threads may outlive the interpreter

  // Maps `fd` (or private memory for fd < 0). An earlier mapping stays mapped: works in flight may still count in it.
  void map(int fd);
  void tick();
  void set_closed_generation(uint64_t generation);
  HandleEntry* add_entry(const std::string& name);
  void clear_entries();

 private:
  WorkerPage();
  std::atomic<uint64_t>& field(size_t offset);

  std::atomic<char*> base_{nullptr};
  std::atomic<uint64_t> used_{0};
};

}  // namespace deadpool
