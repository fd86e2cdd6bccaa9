// Collectives of the rehearsal device with NCCL's manners, over gloo.
//
// An operation is enqueued in a stream of the communicator, behind what its caller enqueued so far, and `wait`
// orders the caller's stream behind it: no wait stops the host. Where a peer is gone the stream stands still
// until `abort`; nothing is raised. After `abort` the communicator can't be used again.
#include "work.h"

#include <torch/csrc/utils/pybind.h>

#include <map>
#include <numeric>
#include <set>

namespace rehearsal {
namespace {

using at::Tensor;

Tensors parts(const Tensor& whole, int size) { return whole.view(-1).chunk(size); }

struct Communicator final : c10d::Backend {
  Communicator(c10::intrusive_ptr<c10d::Backend> below)
      : Backend(below->getRank(), below->getSize()), gloo(std::move(below)) {}

  const std::string getBackendName() const override { return "rehearsal"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds) override {}
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  void abort() override {
    {
      std::lock_guard guard(fate->lock);
      fate->aborted = true;
      if (fate->error.empty()) fate->error = "the communicator was aborted";
      fate->changed.notify_all();
    }
    gloo->abort();
  }
  void shutdown() override { abort(); }

  void startCoalescing() override { together = true; }
  WorkPtr endCoalescing() override {
    together = false;
    std::vector<Operation> operations;
    std::swap(operations, waiting);
    TORCH_CHECK(!operations.empty(), "nothing was coalesced");
    return start(std::move(operations), own_stream(-1), false);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return one(tensors, tensors, [g = gloo, options](Tensors&, Tensors& to) {
      return std::vector<WorkPtr>{g->broadcast(to, options)};
    });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return reduced(tensors, options.reduceOp);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return reduced(tensors, options.reduceOp);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    refuse_average(options.reduceOp);
    return one(tensors, tensors, [g = gloo, options](Tensors&, Tensors& to) {
      return std::vector<WorkPtr>{g->reduce(to, options)};
    });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    TORCH_CHECK(inputs.size() == 1 && outputs.size() == 1, "one tensor for each rank");
    for (const Tensor& each : outputs[0]) same(each.numel(), inputs[0].numel(), "allgather");
    return one(inputs, outputs[0], [g = gloo](Tensors& from, Tensors& to) {
      std::vector<Tensors> all{to};
      return std::vector<WorkPtr>{g->allgather(all, from)};
    });
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    for (size_t n = 0; n < outputs.size(); n++) {
      same(outputs[n].numel(), inputs[n].numel() * size_, "all_gather_into_tensor");
      TORCH_CHECK(outputs[n].dtype() == inputs[n].dtype(), "output tensor must have the same type as input tensor");
    }
    return one(inputs, outputs, [g = gloo, size = size_](Tensors& from, Tensors& to) {
      std::vector<WorkPtr> works;
      for (size_t n = 0; n < to.size(); n++) {
        std::vector<Tensors> all{parts(to[n], size)};
        Tensors input{from[n].view(-1)};
        works.push_back(g->allgather(all, input));
      }
      return works;
    });
  }

  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(inputs.size() == 1 && outputs.size() == 1, "one tensor for each rank");
    for (const Tensor& each : inputs[0]) same(each.numel(), outputs[0].numel(), "reduce_scatter");
    return scattered(outputs, inputs[0], rank_, options.reduceOp);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    for (size_t n = 0; n < outputs.size(); n++) {
      same(inputs[n].numel(), outputs[n].numel() * size_, "reduce_scatter_tensor");
      TORCH_CHECK(outputs[n].dtype() == inputs[n].dtype(), "input tensor must be the same type as the output tensor.");
    }
    return scattered(outputs, inputs, -1, options.reduceOp);
  }

  WorkPtr alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& to_each, std::vector<int64_t>& from_each,
      const c10d::AllToAllOptions&) override {
    Tensors outputs{output}, inputs{input};
    return one(inputs, outputs, [g = gloo, to_each, from_each](Tensors& from, Tensors& to) mutable {
      return std::vector<WorkPtr>{g->alltoall_base(to[0], from[0], to_each, from_each)};
    });
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    std::vector<int64_t> to_each, from_each;
    for (const Tensor& each : outputs) to_each.push_back(each.numel());
    for (const Tensor& each : inputs) from_each.push_back(each.numel());
    return one(inputs, outputs, [g = gloo, to_each, from_each](Tensors& from, Tensors& to) mutable {
      Tensors flat;
      for (const Tensor& each : from) flat.push_back(each.view(-1));
      Tensor sent = at::cat(flat), got = at::empty({0}, sent.options());
      got.resize_({std::accumulate(to_each.begin(), to_each.end(), int64_t{0})});
      g->alltoall_base(got, sent, to_each, from_each)->wait();
      int64_t at = 0;
      for (Tensor& each : to) {
        each.view(-1).copy_(got.narrow(0, at, each.numel()));
        at += each.numel();
      }
      return std::vector<WorkPtr>{};
    });
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    Tensors to = rank_ == options.rootRank ? outputs.at(0) : Tensors{};
    for (const Tensor& each : to) same(each.numel(), inputs[0].numel(), "gather");
    return one(inputs, to, [g = gloo, options](Tensors& from, Tensors& to) {
      std::vector<Tensors> all;
      if (!to.empty()) all.push_back(to);
      return std::vector<WorkPtr>{g->gather(all, from, options)};
    });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    Tensors from = rank_ == options.rootRank ? inputs.at(0) : Tensors{};
    for (const Tensor& each : from) same(each.numel(), outputs[0].numel(), "scatter");
    return one(from, outputs, [g = gloo, options](Tensors& from, Tensors& to) {
      std::vector<Tensors> all;
      if (!from.empty()) all.push_back(from);
      return std::vector<WorkPtr>{g->scatter(to, all, options)};
    });
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    Tensors none;
    return one(tensors, none, [g = gloo, to, tag](Tensors& from, Tensors&) {
      return std::vector<WorkPtr>{g->send(from, to, tag)};
    }, to);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    Tensors none;
    return one(none, tensors, [g = gloo, from, tag](Tensors&, Tensors& to) {
      return std::vector<WorkPtr>{g->recv(to, from, tag)};
    }, from);
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    Operation all{{}, {}, [g = gloo](Tensors&, Tensors&) { return std::vector<WorkPtr>{g->barrier()}; }};
    return start({all}, own_stream(-1), true);
  }

 private:
  void same(int64_t found, int64_t wanted, const char* name) {
    TORCH_CHECK_WITH(
        ValueError, found == wanted, name, ": tensors of every rank must be as large; found ", found, " elements for ",
        wanted);
  }
  void refuse_average(const c10d::ReduceOp& operation) {
    TORCH_CHECK(operation != c10d::ReduceOp::AVG, "reduce with AVG is not rehearsed: use all_reduce");
  }

  WorkPtr reduced(Tensors& tensors, const c10d::ReduceOp& operation) {
    bool average = operation == c10d::ReduceOp::AVG;
    c10d::AllreduceOptions options;
    options.reduceOp = average ? c10d::ReduceOp(c10d::ReduceOp::SUM) : operation;
    Operation each{tensors, tensors, [g = gloo, options](Tensors&, Tensors& to) {
      std::vector<WorkPtr> works;
      for (Tensor& tensor : to) {
        Tensors single{tensor};
        works.push_back(g->allreduce(single, options));
      }
      return works;
    }};
    each.from.clear();
    if (average)
      each.finish = [size = size_](Tensors& to) {
        for (Tensor& tensor : to) tensor.div_(size);
      };
    return add(std::move(each), -1);
  }

  // Of inputs that are reduced whole, the part of this rank; or the input `only`.
  WorkPtr scattered(Tensors& outputs, Tensors& inputs, int only, const c10d::ReduceOp& operation) {
    bool average = operation == c10d::ReduceOp::AVG;
    c10d::AllreduceOptions options;
    options.reduceOp = average ? c10d::ReduceOp(c10d::ReduceOp::SUM) : operation;
    return one(inputs, outputs, [g = gloo, options, only, average, rank = rank_, size = size_](
                                    Tensors& from, Tensors& to) {
      for (Tensor& tensor : from) {
        Tensors single{tensor};
        g->allreduce(single, options)->wait();
        if (average) tensor.div_(size);
      }
      for (size_t n = 0; n < to.size(); n++)
        to[n].view(-1).copy_(only >= 0 ? from[only].view(-1) : parts(from[n], size)[rank]);
      return std::vector<WorkPtr>{};
    });
  }

  WorkPtr one(
      const Tensors& from, const Tensors& to, std::function<std::vector<WorkPtr>(Tensors&, Tensors&)> ask,
      int peer = -1) {
    return add(Operation{from, to, std::move(ask)}, peer);
  }

  WorkPtr add(Operation operation, int peer) {
    for (const Tensors* tensors : {&operation.from, &operation.to})
      for (const Tensor& each : *tensors) {
        TORCH_CHECK(
            each.is_privateuseone(), "No backend type associated with device type ", each.device().type(),
            ": a communicator of the rehearsal device takes no tensors of the host");
        TORCH_CHECK_WITH(ValueError, each.is_contiguous(), "Tensors must be contiguous");
        device = each.device().index();
      }
    if (together) {
      waiting.push_back(std::move(operation));
      return nullptr;
    }
    return start({std::move(operation)}, own_stream(peer), false);
  }

  // Sends to and receives from one peer have a stream of their own, as NCCL has a communicator for each pair.
  c10::Stream own_stream(int peer) {
    auto found = streams.find(peer);
    if (found == streams.end()) found = streams.emplace(peer, new_stream(device)).first;
    return found->second;
  }

  WorkPtr start(std::vector<Operation> operations, c10::Stream stream, bool stops_host) {
    if (begun.insert(stream.id()).second) begin(fate, size_);
    {
      std::lock_guard guard(fate->lock);
      TORCH_CHECK_WITH(DistBackendError, !fate->aborted, "a communicator of the rehearsal device was aborted");
    }
    auto before = new_mark();
    record(before, current_stream(stream.device_index()));
    block(before, stream);
    Tensors results;
    for (Operation& each : operations)
      for (Tensors* tensors : {&each.from, &each.to})
        for (Tensor& tensor : *tensors) {
          if (tensors == &each.to) results.push_back(tensor);
          allocator()->recordStream(tensor.storage().data_ptr(), stream);
          tensor = for_kernel(tensor);
        }
    enqueue(stream, [of = fate, operations] {
      at::AutoDispatchBelowAutograd below;
      perform(of, operations);
    });
    return enqueued(fate, stream, std::move(results), stops_host);
  }

  c10::intrusive_ptr<c10d::Backend> gloo;
  std::shared_ptr<Fate> fate = std::make_shared<Fate>();
  std::map<int, c10::Stream> streams;
  std::set<c10::StreamId> begun;
  c10::DeviceIndex device = current_device();
  bool together = false;
  std::vector<Operation> waiting;
};

}  // namespace

void define_communicator(pybind11::module_& module) {
  module.def("communicator", [](const c10::intrusive_ptr<c10d::Backend>& gloo) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Communicator>(gloo));
  });
  module.def("set_beginning", &set_beginning, pybind11::arg("seconds_per_rank"));
}

}  // namespace rehearsal
