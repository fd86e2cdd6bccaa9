// How tensors of the rehearsal device come into being, share memory, and are copied.
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>

namespace rehearsal {

using at::Tensor;

namespace {

void copy_bytes(char* to, const char* from, size_t bytes) {
  // In two parts, so that what is written in between by mistake is torn where delays are on.
  size_t half = bytes / 2;
  std::memcpy(to, from, half);
  pause();
  std::memcpy(to + half, from + half, bytes - half);
}

}  // namespace

bool here(const Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

c10::Stream stream_of(const Tensor& tensor) { return current_stream(tensor.device().index()); }

Tensor over(c10::Storage storage, c10::DispatchKey key, const Tensor& like) {
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

void copy_on_host(const Tensor& to, const Tensor& from) {
  at::AutoDispatchBelowAutograd below;
  bool plain = to.dtype() == from.dtype() && to.sizes() == from.sizes() && to.is_contiguous() && from.is_contiguous() &&
      to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg();
  if (plain && to.nbytes() > 0)
    copy_bytes(static_cast<char*>(to.mutable_data_ptr()), static_cast<const char*>(from.const_data_ptr()), to.nbytes());
  else
    to.copy_(from);
}

Tensor uploaded(const Tensor& host, c10::Device device) {
  c10::DeviceGuard guard(device);
  Tensor from = host.is_non_overlapping_and_dense() ? host : host.contiguous();
  Tensor made = at::detail::empty_strided_generic(
      from.sizes(), from.strides(), allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      from.scalar_type());
  if (made.nbytes()) std::memcpy(kernel_view(made.data_ptr()), from.const_data_ptr(), made.nbytes());
  return made;
}

Tensor for_kernel(const Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  c10::Storage seen(
      c10::Storage::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(kernel_view(storage.data()), c10::Device(c10::kCPU)), nullptr, false);
  Tensor made = over(std::move(seen), c10::DispatchKey::CPU, tensor);
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

namespace {

Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "a rehearsal device has strided tensors alone");
  TORCH_CHECK(!c10::pinned_memory_or_default(pinned), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pinned) {
  TORCH_CHECK(!c10::pinned_memory_or_default(pinned), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor as_strided(
    const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return as_strided(self, size, stride, c10::SymInt(self.storage_offset()));
}

Tensor& set_storage(
    Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(storage), offset, size, stride);
}

Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  auto count = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(storage), 0, {count}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  if (here(self) && here(to)) {
    c10::Stream stream = stream_of(to);
    if (self.device() != to.device()) synchronize(stream_of(self));
    enqueue(stream, [a = for_kernel(to), b = for_kernel(self)] { copy_on_host(a, b); });
    if (self.device() != to.device()) synchronize(stream);
    return to;
  }
  c10::Stream stream = stream_of(here(self) ? self : to);
  const Tensor& host = here(self) ? to : self;
  // Only from and to pinned memory does a device copy by itself; the storage lives until it has.
  bool alone = non_blocking && is_pinned(host.storage().data());
  if (here(self)) {
    enqueue(stream, [a = alone ? to.detach() : to, b = for_kernel(self)] { copy_on_host(a, b); });
    if (!alone) synchronize(stream);
  } else {
    enqueue(stream, [a = for_kernel(to), b = alone ? self.detach() : self.clone()] { copy_on_host(a, b); });
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  at::native::resize_(to, self.sizes(), std::nullopt);
  return copy_from(self, to, false);
}

at::Scalar number(const Tensor& self) {
  synchronize(stream_of(self));
  return for_kernel(self).item();
}

void record_stream(Tensor& self, c10::Stream stream) {
  allocator()->recordStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", number);
  library.impl("record_stream", record_stream);
}

}  // namespace
}  // namespace rehearsal
