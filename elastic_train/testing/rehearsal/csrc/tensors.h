// Tensors of the rehearsal device, and the same memory as tensors of the host.
#pragma once

#include "device.h"

namespace rehearsal {

bool here(const at::Tensor& tensor);
c10::Stream stream_of(const at::Tensor& tensor);

// A tensor of that kind over a storage, with the sizes and strides of another one.
at::Tensor over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like);
void copy_on_host(const at::Tensor& to, const at::Tensor& from);
at::Tensor uploaded(const at::Tensor& host, c10::Device device);

}  // namespace rehearsal
