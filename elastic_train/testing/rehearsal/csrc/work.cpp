#include "work.h"

#include <atomic>
#include <chrono>
#include <thread>

namespace rehearsal {

using at::Tensor;

namespace {

std::atomic<double> beginning{0};

struct Attempt {
  std::mutex lock;
  bool over = false;
  std::string error;
};

struct Enqueued final : c10d::Work {
  Enqueued(std::shared_ptr<Fate> of, c10::Stream stream, Tensors results, bool stops)
      : fate(std::move(of)), mark(new_mark()), device(stream.device_index()), stops_host(stops) {
    record(mark, stream);
    future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream.device()});
    c10::Stream before = exchange_stream(stream);
    future->markCompleted(c10::IValue(results));
    exchange_stream(before);
    outputs = std::move(results);
  }
  bool isCompleted() override { return reached(mark); }
  bool isSuccess() const override {
    std::lock_guard guard(fate->lock);
    return !fate->aborted && fate->error.empty();
  }
  std::exception_ptr exception() const override {
    std::lock_guard guard(fate->lock);
    return fate->error.empty() ? nullptr : std::make_exception_ptr(std::runtime_error(fate->error));
  }
  void synchronize() override { block(mark, current_stream(device)); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (stops_host) rehearsal::synchronize(current_stream(device));
    return true;
  }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }

  std::shared_ptr<Fate> fate;
  std::shared_ptr<Mark> mark;
  c10::DeviceIndex device;
  bool stops_host;
  Tensors outputs;
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

}  // namespace

// Ask gloo on a thread of its own, which is left behind where it hangs.
void perform(const std::shared_ptr<Fate>& fate, const std::vector<Operation>& operations) {
  struct Half {
    Tensors from, to;
  };
  auto halves = std::make_shared<std::vector<Half>>();
  for (const Operation& each : operations) {
    Half half;
    for (const Tensor& tensor : each.from) half.from.push_back(tensor.clone(at::MemoryFormat::Contiguous));
    for (const Tensor& tensor : each.to) half.to.push_back(tensor.clone(at::MemoryFormat::Contiguous));
    halves->push_back(std::move(half));
  }
  auto attempt = std::make_shared<Attempt>();
  std::vector<std::function<std::vector<WorkPtr>(Tensors&, Tensors&)>> asks;
  for (const Operation& each : operations) asks.push_back(each.ask);
  std::thread([fate, attempt, halves, asks] {
    std::string error;
    try {
      std::vector<WorkPtr> works;
      for (size_t n = 0; n < asks.size(); n++)
        for (auto& work : asks[n]((*halves)[n].from, (*halves)[n].to)) works.push_back(work);
      for (auto& work : works) work->wait();
    } catch (const std::exception& raised) {
      error = raised.what();
    }
    std::lock_guard guard(fate->lock);
    attempt->error = error;
    attempt->over = true;
    fate->changed.notify_all();
  }).detach();
  std::unique_lock guard(fate->lock);
  fate->changed.wait(guard, [&] { return attempt->over || fate->aborted; });
  if (!attempt->error.empty()) {
    if (fate->error.empty()) fate->error = attempt->error;
    fate->changed.wait(guard, [&] { return fate->aborted; });  // as a kernel that polls for a peer who is gone
  }
  if (fate->aborted) return;
  guard.unlock();
  for (size_t n = 0; n < operations.size(); n++) {
    operations[n].finish((*halves)[n].to);
    for (size_t each = 0; each < operations[n].to.size(); each++)
      Tensor(operations[n].to[each]).copy_((*halves)[n].to[each]);
  }
}

WorkPtr enqueued(const std::shared_ptr<Fate>& fate, c10::Stream stream, Tensors results, bool stops_host) {
  return c10::make_intrusive<Enqueued>(fate, stream, std::move(results), stops_host);
}

void set_beginning(double seconds_per_rank) { beginning = seconds_per_rank; }

void begin(const std::shared_ptr<Fate>& fate, int ranks) {
  std::unique_lock guard(fate->lock);
  fate->changed.wait_for(guard, std::chrono::duration<double>(beginning * ranks), [&] { return fate->aborted; });
}

}  // namespace rehearsal
