// Operations: the CPU's own, over the mapping that may be touched.
//
// What only writes into tensors that are there is enqueued and the host goes on; so is whatever torch can give
// a shape to beforehand, which comes here with a tensor to fill. The rest is run when everything before it in the
// stream is done, since only the CPU's kernel knows its shape: to the host it looks as if it had been fast.
#include "tensors.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>

namespace rehearsal {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// How an operation is called, found once.
struct Call {
  bool random, writes_alone;
  explicit Call(const c10::OperatorHandle& op) : random(op.hasTag(at::Tag::nondeterministic_seeded)) {
    const auto& schema = op.schema();
    const std::string& name = schema.name();
    bool in_place = name.back() == '_' && name[name.size() - 2] != '_';
    writes_alone = in_place || !schema.returns().empty();
    for (const auto& each : schema.returns())
      writes_alone = writes_alone && each.alias_info() != nullptr && each.alias_info()->isWrite();
  }
};

const Call& call_of(const c10::OperatorHandle& op) {
  static auto* lock = new std::mutex;
  static auto* known = new std::unordered_map<c10::OperatorName, Call>;
  std::lock_guard guard(*lock);
  return known->try_emplace(op.operator_name(), op).first->second;
}

// CUDA takes numbers of the host, and indexes; any other tensor of the host is refused.
bool takes_host_tensors(const std::string& name) {
  return name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_";
}

struct Arguments {
  Stack kernel;  // as the CPU's kernel takes them
  std::vector<Tensor> tensors;  // of the device
  std::vector<std::pair<Tensor, Tensor>> outs;  // those it gives a shape to, and what the kernel fills
  std::optional<c10::Device> device;
  bool drawn = false;

  Arguments(const c10::OperatorHandle& op, c10::ArrayRef<IValue> given) {
    const auto& schema = op.schema();
    find_device(given);
    TORCH_CHECK(device, schema.name(), " was called on a rehearsal device with nothing that is there");
    for (size_t n = 0; n < given.size(); n++) kernel.push_back(converted(op, schema.arguments()[n], given[n]));
  }

 private:
  void find_device(c10::ArrayRef<IValue> given) {
    auto look = [&](const Tensor& tensor) {
      if (!here(tensor)) return;
      TORCH_CHECK(
          !device || tensor.device() == *device || tensor.dim() == 0,
          "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
          tensor.device(), "!");
      if (!device) device = tensor.device();
      tensors.push_back(tensor);
    };
    for (const IValue& value : given) {
      if (value.isTensor()) look(value.toTensor());
      if (value.isTensorList() || value.isOptionalTensorList())
        for (const IValue& each : value.toListRef())
          if (each.isTensor()) look(each.toTensor());
    }
    for (const IValue& value : given)
      if (!device && value.isDevice() && value.toDevice().is_privateuseone()) {
        auto asked = value.toDevice();
        device = asked.has_index() ? asked : c10::Device(c10::kPrivateUse1, current_device());
      }
  }

  IValue converted(const c10::OperatorHandle& op, const c10::Argument& argument, const IValue& value) {
    if (value.isTensor()) {
      const Tensor& tensor = value.toTensor();
      bool out = argument.kwarg_only() && argument.alias_info() != nullptr && argument.alias_info()->isWrite();
      if (out && here(tensor) && tensor.numel() == 0) {
        outs.emplace_back(tensor, at::empty({0}, tensor.options().device(at::kCPU)));
        return outs.back().second;
      }
      return kernel_tensor(op, tensor);
    }
    if (value.isTensorList()) {
      c10::List<Tensor> all;
      for (const IValue& each : value.toListRef()) all.push_back(kernel_tensor(op, each.toTensor()));
      return all;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> all;
      for (const IValue& each : value.toListRef())
        all.push_back(each.isTensor() ? std::optional<Tensor>(kernel_tensor(op, each.toTensor())) : std::nullopt);
      return all;
    }
    if (value.isDevice()) return IValue(c10::Device(c10::kCPU));
    if (argument.name() == "generator") {
      drawn = true;
      if (value.isNone()) return IValue(host_generator(default_generator(device->index())));
      const at::Generator& generator = value.toGenerator();
      TORCH_CHECK(
          generator.device().is_privateuseone(), "Expected a '", *device, "' device type for generator but found '",
          generator.device(), "'");
      return IValue(host_generator(generator));
    }
    return value;
  }

  Tensor kernel_tensor(const c10::OperatorHandle& op, const Tensor& tensor) {
    if (!tensor.defined() || here(tensor)) return tensor.defined() ? for_kernel(tensor) : tensor;
    TORCH_CHECK(
        tensor.dim() == 0 || takes_host_tensors(op.schema().name()),
        "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and cpu! (in ",
        op.schema().name(), ")");
    return tensor.dim() == 0 ? tensor.clone() : tensor;  // read when the host says so, not when it is run
  }
};

Tensor returned(const Tensor& host, const Arguments& arguments) {
  if (!host.defined()) return host;
  if (is_kernel_view(host.storage().data()))
    for (const Tensor& tensor : arguments.tensors)
      if (kernel_view(tensor.storage().data()) == host.storage().data())
        return over(tensor.storage(), c10::DispatchKey::PrivateUse1, host);
  return uploaded(host, *arguments.device);
}

IValue returned(const IValue& value, const Arguments& arguments) {
  if (value.isTensor()) return returned(value.toTensor(), arguments);
  if (value.isTensorList()) {
    c10::List<Tensor> all;
    for (const IValue& each : value.toListRef()) all.push_back(returned(each.toTensor(), arguments));
    return all;
  }
  return value;
}

// The argument that an operation returns again, by the name that its schema gives to both.
std::optional<size_t> same_argument(const c10::FunctionSchema& schema, const c10::Argument& result) {
  if (result.alias_info() == nullptr || !result.alias_info()->isWrite()) return std::nullopt;
  for (size_t n = 0; n < schema.arguments().size(); n++) {
    const auto* alias = schema.arguments()[n].alias_info();
    if (alias != nullptr && alias->isWrite() && alias->beforeSets() == result.alias_info()->beforeSets()) return n;
  }
  return std::nullopt;
}

void run(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowAutograd below;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

void run_drawing(const c10::OperatorHandle& op, Stack& stack, c10::DeviceIndex device) {
  // It draws from the CPU's generator and can't be told another: that one is lent the device's state.
  static auto* one = new std::mutex;
  std::lock_guard guard(*one);
  at::Generator host = at::detail::getDefaultCPUGenerator(), own = host_generator(default_generator(device));
  Tensor before = host.get_state();
  host.set_state(own.get_state());
  auto restore = [&] {
    own.set_state(host.get_state());
    host.set_state(before);
  };
  try {
    run(op, stack);
  } catch (...) {
    restore();
    throw;
  }
  restore();
}

void perform(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const Call& call = call_of(op);
  size_t count = schema.arguments().size();
  auto given = torch::jit::last(*stack, count).vec();
  Arguments arguments(op, given);
  c10::DeviceIndex device = arguments.device->index();
  c10::Stream stream = current_stream(device);
  c10::DeviceGuard guard(*arguments.device);
  Stack results;
  if (call.writes_alone && !call.random && arguments.outs.empty()) {
    enqueue(stream, [op, values = arguments.kernel]() mutable { run(op, values); });
  } else {
    synchronize(stream);
    TORCH_CHECK(!is_held(stream), schema.name(), " needs its stream at once, which is held by the test");
    results = arguments.kernel;
    if (call.random && !arguments.drawn)
      run_drawing(op, results, device);
    else
      run(op, results);
    for (auto& [out, filled] : arguments.outs) {
      at::native::resize_output(out, filled.sizes());
      copy_on_host(for_kernel(out), filled);
    }
  }
  torch::jit::drop(*stack, count);
  for (size_t n = 0; n < schema.returns().size(); n++) {
    auto same = same_argument(schema, schema.returns()[n]);
    stack->push_back(same ? given[*same] : returned(results[n], arguments));
  }
}

// Torch leaves these to a device that it doesn't know.
Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  synchronize(stream_of(input));
  at::AutoDispatchBelowAutograd below;
  auto with = bias && bias->defined() ? std::optional<Tensor>(for_kernel(*bias)) : std::nullopt;
  return uploaded(
      at::convolution_symint(
          for_kernel(input), for_kernel(weight), with, stride, padding, dilation, transposed, output_padding, groups),
      input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> wanted) {
  synchronize(stream_of(input));
  at::AutoDispatchBelowAutograd below;
  std::vector<c10::SymInt> bias{weight.sym_size(transposed ? 1 : 0) * (transposed ? groups : c10::SymInt(1))};
  auto [a, b, c] = at::convolution_backward_symint(
      for_kernel(gradient), for_kernel(input), for_kernel(weight), at::OptionalSymIntArrayRef(bias), stride, padding,
      dilation, transposed, output_padding, groups, wanted);
  auto up = [&](const Tensor& each) { return each.defined() ? uploaded(each, input.device()) : each; };
  return {up(a), up(b), up(c)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&perform>());
}

}  // namespace
}  // namespace rehearsal
