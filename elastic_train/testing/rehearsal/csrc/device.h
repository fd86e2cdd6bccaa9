// The parts of the rehearsal device: its memory, its queues, its random numbers.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/Generator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <string>

namespace rehearsal {

constexpr c10::DeviceIndex MAX_DEVICES = 8;
constexpr c10::StreamId MAX_STREAMS = 64;  // of a device; 0 is the default one

// memory.cpp. Every device's memory is mapped twice: tensors hold addresses of a mapping that nobody may
// touch, kernels work on the other. So a wrong access faults whenever it happens, also beside a kernel.

c10::DeviceAllocator* allocator();
void set_limit(c10::DeviceIndex device, size_t bytes);
void* kernel_view(const void* address);  // what a kernel may touch; an address of the host stays as it is
bool is_kernel_view(const void* address);
c10::DeviceIndex device_of(const void* address);  // -1: of none
void pin(void* address, size_t bytes);
bool unpin(void* address);
bool is_pinned(const void* address);

// queues.cpp. A stream is a thread that runs what is enqueued, in order. Nothing but events, and waits of
// the host, orders what is in different streams.

using Task = std::function<void()>;

// Recorded in one stream, waited for in others: version by version, as often as it is recorded.
struct Mark;

void set_device_count(c10::DeviceIndex count);
c10::DeviceIndex device_count() noexcept;
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
c10::Stream numbered_stream(c10::DeviceIndex device, c10::StreamId id);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(c10::DeviceIndex device);

void enqueue(c10::Stream stream, Task task);
bool idle(c10::Stream stream);
bool idle_device(c10::DeviceIndex device);
void synchronize(c10::Stream stream);  // raises the first error of what ran there since the last time
void fail(c10::DeviceIndex device);  // from now on whoever waits for it gets an error that stays
void synchronize_device(c10::DeviceIndex device);

std::shared_ptr<Mark> new_mark();
void record(const std::shared_ptr<Mark>& mark, c10::Stream stream);
void block(const std::shared_ptr<Mark>& mark, c10::Stream stream);
bool reached(const std::shared_ptr<Mark>& mark);
void wait_for(const std::shared_ptr<Mark>& mark);
double seconds_between(const std::shared_ptr<Mark>& first, const std::shared_ptr<Mark>& second);

// What a test does to time: each task waits up to this long at first, copies in their middle too.
void set_delay(double seconds, uint64_t seed);
void pause();
// Run nothing more of a stream until it is let go.
bool is_held(c10::Stream stream);
void hold(c10::DeviceIndex device, c10::StreamId stream, bool held);

// random.cpp

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);
at::Generator host_generator(const at::Generator& generator);  // the one that draws for it

// tensors.cpp

// The same tensor for a kernel: on the CPU, over the mapping that may be touched.
at::Tensor for_kernel(const at::Tensor& tensor);

}  // namespace rehearsal
