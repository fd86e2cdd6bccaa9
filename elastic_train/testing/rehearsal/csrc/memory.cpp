#include "device.h"

#include <ATen/core/CachingHostAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace rehearsal {
namespace {

constexpr size_t ROOM = size_t{1} << 36;  // of addresses; pages are there once they are written
constexpr size_t KEPT = size_t{256} << 20;  // freed bytes that keep their pages
constexpr size_t PAGE = 4096;
constexpr size_t SMALL = size_t{1} << 20;
constexpr size_t POISONED = size_t{16} << 20;

using Stats = c10::CachingDeviceAllocator::DeviceStats;
constexpr size_t ALL = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

struct Block {
  size_t offset, size, asked;
  c10::StreamId stream;  // in whose order it is given away again
  std::vector<c10::Stream> users;  // others that were said to use it
};

struct Pending {
  Block block;
  std::vector<std::shared_ptr<Mark>> marks;
};

struct Arena {
  std::once_flag mapped;
  std::atomic<bool> ready{false};
  char* forbidden = nullptr;
  char* allowed = nullptr;
  size_t used = 0;  // of the room
  size_t kept = 0;
  size_t limit = size_t{8} << 30;
  Stats stats;
  std::unordered_map<size_t, Block> given;  // by offset
  std::map<std::pair<c10::StreamId, size_t>, std::vector<size_t>> free;
  std::vector<Pending> pending;
};

// Never destroyed: threads of streams live as long as the process.
std::mutex& lock() {
  static auto* found = new std::mutex;
  return *found;
}

void map(Arena& made) {
  int file = memfd_create("rehearsal", 0);
  TORCH_CHECK(file >= 0 && ftruncate(file, ROOM) == 0, "no memory for a rehearsal device");
  auto seen = [&](int access) {
    void* at = mmap(nullptr, ROOM, access, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(at != MAP_FAILED, "no addresses for a rehearsal device: ", std::strerror(errno));
    madvise(at, ROOM, MADV_DONTDUMP);
    return static_cast<char*>(at);
  };
  made.allowed = seen(PROT_READ | PROT_WRITE);
  made.forbidden = seen(PROT_NONE);
  close(file);
  made.ready = true;
}

Arena& unmapped(c10::DeviceIndex device) {
  static auto* arenas = new std::array<Arena, MAX_DEVICES>;
  return (*arenas)[device];
}

Arena& arena(c10::DeviceIndex device) {
  Arena& found = unmapped(device);
  std::call_once(found.mapped, [&] { map(found); });
  return found;
}

bool within(const void* address, const char* begin) {
  auto* at = static_cast<const char*>(address);
  return at >= begin && at < begin + ROOM;
}

size_t rounded(size_t bytes) {
  size_t to = bytes < SMALL ? 512 : SMALL;
  return std::max<size_t>((bytes + to - 1) / to * to, 512);
}

void recycle(Arena& in, const Block& block) {
  in.free[{block.stream, block.size}].push_back(block.offset);
  in.kept += block.size;
}

void take_back(Arena& in) {
  auto done = [&](const Pending& one) {
    bool over = std::all_of(one.marks.begin(), one.marks.end(), reached);
    if (over) recycle(in, one.block);
    return over;
  };
  in.pending.erase(std::remove_if(in.pending.begin(), in.pending.end(), done), in.pending.end());
}

void drop_pages(Arena& in) {
  for (auto& [key, offsets] : in.free)
    for (size_t offset : offsets) {
      size_t begin = (offset + PAGE - 1) / PAGE * PAGE, end = (offset + key.second) / PAGE * PAGE;
      if (end > begin) madvise(in.allowed + begin, end - begin, MADV_REMOVE);
    }
  in.kept = 0;
}

void release(void* address);

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::DeviceIndex device = current_device();
    c10::Device where(c10::kPrivateUse1, device);
    if (bytes == 0) return {nullptr, nullptr, &release, where};
    c10::StreamId stream = current_stream(device).id();
    std::lock_guard guard(lock());
    Arena& in = arena(device);
    take_back(in);
    size_t size = rounded(bytes);
    auto held = static_cast<size_t>(in.stats.allocated_bytes[ALL].current);
    if (held + size > in.limit) {
      in.stats.num_ooms++;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "rehearsal out of memory. Tried to allocate ", bytes, " bytes on device ",
          static_cast<int>(device), ": ", held, " of ", in.limit, " are allocated.");
    }
    size_t offset;
    auto& free = in.free[{stream, size}];
    if (!free.empty()) {
      offset = free.back();
      free.pop_back();
      in.kept -= std::min(in.kept, size);
    } else {
      TORCH_CHECK(in.used + size <= ROOM, "a rehearsal device has no addresses left");
      offset = in.used;
      in.used += size;
    }
    in.given[offset] = Block{offset, size, bytes, stream, {}};
    in.stats.allocation[ALL].increase(1);
    in.stats.allocated_bytes[ALL].increase(size);
    in.stats.active_bytes[ALL].increase(size);
    in.stats.reserved_bytes[ALL].increase(size);
    in.stats.requested_bytes[ALL].increase(bytes);
    void* at = in.forbidden + offset;
    return {at, at, &release, where};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    synchronize_device(device_of(from));
    std::memcpy(kernel_view(to), kernel_view(from), bytes);
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    for (c10::DeviceIndex device = 0; device < device_count(); device++) {
      synchronize_device(device);
      std::lock_guard guard(lock());
      take_back(arena(device));
      drop_pages(arena(device));
    }
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get() == nullptr) return;
    std::lock_guard guard(lock());
    Arena& in = arena(data.device().index());
    auto found = in.given.find(static_cast<char*>(data.get()) - in.forbidden);
    if (found != in.given.end() && stream.id() != found->second.stream)
      found->second.users.push_back(stream);
  }

  Stats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard guard(lock());
    return arena(device).stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard guard(lock());
    Stats& stats = arena(device).stats;
    for (auto* each : {&stats.allocation, &stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes,
                       &stats.requested_bytes})
      (*each)[ALL].reset_accumulated();
    stats.num_ooms = 0;
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard guard(lock());
    Stats& stats = arena(device).stats;
    for (auto* each : {&stats.allocation, &stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes,
                       &stats.requested_bytes})
      (*each)[ALL].reset_peak();
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard guard(lock());
    Arena& in = arena(device);
    return {in.limit - static_cast<size_t>(in.stats.allocated_bytes[ALL].current), in.limit};
  }
};

DeviceMemory& memory() {
  static auto* found = new DeviceMemory;
  return *found;
}

void release(void* address) {
  if (address == nullptr) return;
  c10::DeviceIndex device = device_of(address);
  std::unique_lock guard(lock());
  Arena& in = arena(device);
  auto found = in.given.find(static_cast<char*>(address) - in.forbidden);
  Block block = std::move(found->second);
  in.given.erase(found);
  in.stats.allocation[ALL].decrease(1);
  in.stats.allocated_bytes[ALL].decrease(block.size);
  in.stats.active_bytes[ALL].decrease(block.size);
  in.stats.reserved_bytes[ALL].decrease(block.size);
  in.stats.requested_bytes[ALL].decrease(block.asked);
  // Whoever reads it in another stream without having said so reads numbers that are none.
  char* bytes = in.allowed + block.offset;
  size_t size = std::min(block.asked, POISONED);
  c10::Stream own = numbered_stream(device, block.stream);
  auto users = std::move(block.users);
  block.users.clear();
  guard.unlock();
  if (users.empty()) {
    if (idle(own))
      std::memset(bytes, 0xFF, size);
    else
      enqueue(own, [bytes, size] { std::memset(bytes, 0xFF, size); });
    guard.lock();
    recycle(in, block);
  } else {
    Pending pending{block, {}};
    users.push_back(own);
    for (c10::Stream user : users) {
      pending.marks.push_back(new_mark());
      record(pending.marks.back(), user);
    }
    guard.lock();
    in.pending.push_back(std::move(pending));
  }
  if (in.kept > KEPT && idle_device(device)) drop_pages(in);
}

// Host memory that the device may copy from and to by itself.

std::map<const char*, size_t>& pinned() {
  static auto* found = new std::map<const char*, size_t>;
  return *found;
}

void unpin_and_free(void* address) {
  unpin(address);
  std::free(address);
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* at = bytes ? std::aligned_alloc(PAGE, (bytes + PAGE - 1) / PAGE * PAGE) : nullptr;
    if (at != nullptr) pin(at, bytes);
    return {at, at, &unpin_and_free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin_and_free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // copies hold their storages
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedMemory& pinned_memory() {
  static auto* found = new PinnedMemory;
  return *found;
}

const bool registered = [] {
  c10::SetAllocator(c10::kPrivateUse1, &memory());
  at::setHostAllocator(c10::kPrivateUse1, &pinned_memory(), 0);
  return true;
}();

}  // namespace

c10::DeviceAllocator* allocator() { return &memory(); }

void set_limit(c10::DeviceIndex device, size_t bytes) {
  std::lock_guard guard(lock());
  arena(device).limit = bytes;
}

c10::DeviceIndex device_of(const void* address) {
  for (c10::DeviceIndex device = 0; device < device_count(); device++)
    if (unmapped(device).ready && within(address, unmapped(device).forbidden)) return device;
  return -1;
}

void* kernel_view(const void* address) {
  c10::DeviceIndex device = device_of(address);
  if (device < 0) return const_cast<void*>(address);
  Arena& in = arena(device);
  return in.allowed + (static_cast<const char*>(address) - in.forbidden);
}

bool is_kernel_view(const void* address) {
  for (c10::DeviceIndex device = 0; device < device_count(); device++)
    if (unmapped(device).ready && within(address, unmapped(device).allowed)) return true;
  return false;
}

void pin(void* address, size_t bytes) {
  std::lock_guard guard(lock());
  pinned()[static_cast<const char*>(address)] = bytes;
}

bool unpin(void* address) {
  std::lock_guard guard(lock());
  return pinned().erase(static_cast<const char*>(address)) > 0;
}

bool is_pinned(const void* address) {
  std::lock_guard guard(lock());
  auto* at = static_cast<const char*>(address);
  auto after = pinned().upper_bound(at);
  return after != pinned().begin() && at < std::prev(after)->first + std::prev(after)->second;
}

}  // namespace rehearsal
