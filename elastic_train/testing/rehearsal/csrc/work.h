// One operation between ranks, on its way: what is asked of gloo, and what torch sees of it.
#pragma once

#include "device.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <condition_variable>
#include <mutex>

namespace rehearsal {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Of a communicator: whether it was aborted, and what went wrong first, which nobody is told unasked.
struct Fate {
  std::mutex lock;
  std::condition_variable changed;
  bool aborted = false;
  std::string error;
};

// One operation: what it reads, what it writes, and how gloo is asked, with tensors of the host in their place.
struct Operation {
  Tensors from, to;
  std::function<std::vector<WorkPtr>(Tensors& from, Tensors& to)> ask;
  std::function<void(Tensors& to)> finish = [](Tensors&) {};
};

// Done when it returns; where a peer is gone it returns after an abort alone, and nothing was written.
void perform(const std::shared_ptr<Fate>& fate, const std::vector<Operation>& operations);

// What was enqueued in a stream just now. `stops_host`: a wait for it is one of the host.
WorkPtr enqueued(const std::shared_ptr<Fate>& fate, c10::Stream stream, Tensors results, bool stops_host);

// NCCL makes a communicator when it is first used, which takes the longer the more ranks there are: this long
// for each of them. Returns early after an abort.
void set_beginning(double seconds_per_rank);
void begin(const std::shared_ptr<Fate>& fate, int ranks);

}  // namespace rehearsal
