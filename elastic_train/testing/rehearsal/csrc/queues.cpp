#include "device.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace rehearsal {

using Clock = std::chrono::steady_clock;

struct Mark {
  std::mutex lock;
  std::condition_variable changed;
  uint64_t recorded = 0, done = 0;
  Clock::time_point at;
};

namespace {

// Lets go of what was run. That may take Python's lock, for which no queue may wait: a host that waits for the
// queue may hold it.
struct Reaper {
  std::mutex lock;
  std::condition_variable changed;
  std::vector<Task> over;

  Reaper() {
    std::thread([this] {
      while (true) {
        std::vector<Task> taken;
        std::unique_lock guard(lock);
        changed.wait(guard, [&] { return !over.empty(); });
        std::swap(taken, over);
        guard.unlock();
        taken.clear();
      }
    }).detach();
  }

  void take(Task task) {
    std::lock_guard guard(lock);
    over.push_back(std::move(task));
    changed.notify_one();
  }
};

Reaper& reaper() {
  static auto* found = new Reaper;
  return *found;
}

struct Queue {
  std::mutex lock;
  std::condition_variable changed;
  std::deque<Task> tasks;
  bool running = false, held = false, started = false;
  std::string error;

  void run() {
    std::unique_lock guard(lock);
    while (true) {
      changed.wait(guard, [&] { return !held && !tasks.empty(); });
      Task task = std::move(tasks.front());
      tasks.pop_front();
      running = true;
      guard.unlock();
      std::string failed;
      try {
        pause();
        task();
      } catch (const std::exception& raised) {
        failed = raised.what();
      }
      reaper().take(std::move(task));
      guard.lock();
      if (error.empty()) error = failed;
      running = false;
      changed.notify_all();
    }
  }
};

// Never destroyed: their threads live as long as the process.
Queue& queue(c10::DeviceIndex device, c10::StreamId stream) {
  static auto* queues = new std::array<std::array<Queue, MAX_STREAMS>, MAX_DEVICES>;
  TORCH_CHECK(stream >= 0 && stream < MAX_STREAMS, "no stream ", stream, " on a rehearsal device");
  return (*queues)[device][stream];
}

Queue& queue(c10::Stream stream) { return queue(stream.device_index(), stream.id()); }

std::atomic<c10::DeviceIndex> devices{2};
std::array<std::atomic<int>, MAX_DEVICES> streams_made;
std::array<std::atomic<bool>, MAX_DEVICES> failed;
thread_local c10::DeviceIndex device_here = 0;
thread_local std::array<c10::StreamId, MAX_DEVICES> streams_here{};

std::atomic<double> longest_delay{0};
std::mutex& chance_lock() {
  static auto* found = new std::mutex;
  return *found;
}
std::mt19937_64 chance;

}  // namespace

void set_device_count(c10::DeviceIndex count) {
  TORCH_CHECK(count > 0 && count <= MAX_DEVICES, "1 to 8 rehearsal devices");
  devices = count;
}

c10::DeviceIndex device_count() noexcept { return devices; }

c10::DeviceIndex current_device() { return device_here; }

void set_current_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < devices, "there is no rehearsal device ", static_cast<int>(device));
  device_here = device;
}

c10::Stream numbered_stream(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, device), id);
}

c10::Stream current_stream(c10::DeviceIndex device) {
  if (device < 0) device = device_here;
  return numbered_stream(device, streams_here[device]);
}

c10::Stream exchange_stream(c10::Stream stream) {
  c10::Stream before = current_stream(stream.device_index());
  streams_here[stream.device_index()] = stream.id();
  return before;
}

c10::Stream new_stream(c10::DeviceIndex device) {
  if (device < 0) device = device_here;
  // As on a GPU the streams of a pool are given out again and again.
  c10::StreamId id = 1 + streams_made[device]++ % (MAX_STREAMS - 1);
  return numbered_stream(device, id);
}

void enqueue(c10::Stream stream, Task task) {
  Queue& to = queue(stream);
  std::lock_guard guard(to.lock);
  if (!to.started) {
    to.started = true;
    std::thread([&to] { to.run(); }).detach();
  }
  to.tasks.push_back(std::move(task));
  to.changed.notify_all();
}

bool idle(c10::Stream stream) {
  Queue& of = queue(stream);
  std::lock_guard guard(of.lock);
  return of.tasks.empty() && !of.running && !of.held;
}

void fail(c10::DeviceIndex device) { failed[device] = true; }

void synchronize(c10::Stream stream) {
  if (failed[stream.device_index()])
    throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 1, "an error of a rehearsal device that stays");
  Queue& of = queue(stream);
  std::unique_lock guard(of.lock);
  of.changed.wait(guard, [&] { return of.tasks.empty() && !of.running; });
  std::string error;
  std::swap(error, of.error);
  TORCH_CHECK(error.empty(), "an operation of a rehearsal device failed earlier: ", error);
}

void synchronize_device(c10::DeviceIndex device) {
  if (device < 0) device = device_here;
  for (c10::StreamId id = 0; id < MAX_STREAMS; id++)
    synchronize(numbered_stream(device, id));
}

bool idle_device(c10::DeviceIndex device) {
  for (c10::StreamId id = 0; id < MAX_STREAMS; id++)
    if (!idle(numbered_stream(device, id))) return false;
  return true;
}

std::shared_ptr<Mark> new_mark() { return std::make_shared<Mark>(); }

void record(const std::shared_ptr<Mark>& mark, c10::Stream stream) {
  uint64_t version;
  {
    std::lock_guard guard(mark->lock);
    version = ++mark->recorded;
  }
  enqueue(stream, [mark, version] {
    std::lock_guard guard(mark->lock);
    mark->done = std::max(mark->done, version);
    mark->at = Clock::now();
    mark->changed.notify_all();
  });
}

void block(const std::shared_ptr<Mark>& mark, c10::Stream stream) {
  uint64_t version;
  {
    std::lock_guard guard(mark->lock);
    version = mark->recorded;
  }
  if (version == 0) return;  // never recorded: nothing to wait for
  enqueue(stream, [mark, version] {
    std::unique_lock guard(mark->lock);
    mark->changed.wait(guard, [&] { return mark->done >= version; });
  });
}

bool reached(const std::shared_ptr<Mark>& mark) {
  std::lock_guard guard(mark->lock);
  return mark->done >= mark->recorded;
}

void wait_for(const std::shared_ptr<Mark>& mark) {
  std::unique_lock guard(mark->lock);
  uint64_t version = mark->recorded;
  mark->changed.wait(guard, [&] { return mark->done >= version; });
}

double seconds_between(const std::shared_ptr<Mark>& first, const std::shared_ptr<Mark>& second) {
  std::scoped_lock guard(first->lock, second->lock);
  TORCH_CHECK(first->done && second->done, "an event was not recorded, or is not reached yet");
  return std::chrono::duration<double>(second->at - first->at).count();
}

void set_delay(double seconds, uint64_t seed) {
  std::lock_guard guard(chance_lock());
  chance.seed(seed);
  longest_delay = seconds;
}

void pause() {
  double longest = longest_delay;
  if (longest <= 0) return;
  double drawn;
  {
    std::lock_guard guard(chance_lock());
    drawn = std::uniform_real_distribution<double>(0, longest)(chance);
  }
  std::this_thread::sleep_for(std::chrono::duration<double>(drawn));
}

bool is_held(c10::Stream stream) {
  Queue& of = queue(stream);
  std::lock_guard guard(of.lock);
  return of.held;
}

void hold(c10::DeviceIndex device, c10::StreamId stream, bool held) {
  Queue& of = queue(device, stream);
  std::lock_guard guard(of.lock);
  of.held = held;
  of.changed.notify_all();
}

}  // namespace rehearsal
