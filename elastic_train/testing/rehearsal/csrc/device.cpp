// What torch asks of a device: guards, events, hooks, generators.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>

namespace rehearsal {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

Device numbered(DeviceIndex index) { return Device(c10::kPrivateUse1, index); }
std::shared_ptr<Mark>& mark_of(void* event) { return *static_cast<std::shared_ptr<Mark>*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return numbered(current_device()); }
  void setDevice(Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) set_current_device(device.index());
  }
  Stream getStream(Device device) const override { return current_stream(device.index()); }
  Stream getDefaultStream(Device device) const override { 
    return numbered_stream(device.index() < 0 ? current_device() : device.index(), 0);
   }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return new_stream(device.index()); }
  Stream getNewStream(Device device, int) const override { return new_stream(device.index()); }
  Stream exchangeStream(Stream stream) const override { return exchange_stream(stream); }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new std::shared_ptr<Mark>(new_mark());
    rehearsal::record(mark_of(*event), stream);
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<std::shared_ptr<Mark>*>(event);
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) rehearsal::block(mark_of(event), stream);
  }
  bool queryEvent(void* event) const override { return event == nullptr || reached(mark_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) wait_for(mark_of(event));
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    return 1e3 * seconds_between(mark_of(first), mark_of(second));
  }
  bool queryStream(const Stream& stream) const override { return idle(stream); }
  void synchronizeStream(const Stream& stream) const override { synchronize(stream); }
  void synchronizeDevice(DeviceIndex device) const override { synchronize_device(device); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    allocator()->recordStream(data, stream);
  }
};

// Draws what the CPU's generator draws from the same seed.
struct Generator final : c10::GeneratorImpl {
  Generator(DeviceIndex index, at::Generator draws)
      : GeneratorImpl(numbered(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(std::move(draws)) {}

  static c10::DeviceType device_type() { return c10::kPrivateUse1; }
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "a rehearsal generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "a rehearsal generator has no offset"); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.unsafeGetGeneratorImpl()->seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(device_.index(), inner.clone()); }

  at::Generator inner;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return device_count(); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(DeviceIndex device) const override { set_current_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    DeviceIndex before = current_device();
    set_current_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current_device() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(c10::kPrivateUse1); }
  Device getDeviceFromPtr(void* address) const override { return numbered(device_of(address)); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override { return new_generator(device); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    c10::DataPtr grown = allocator()->allocate(bytes);
    size_t kept = std::min(bytes, storage.nbytes());
    char *to = static_cast<char*>(kernel_view(grown.get())), *from = static_cast<char*>(kernel_view(storage.data()));
    if (kept) enqueue(current_stream(storage.device().index()), [=] { std::memcpy(to, from, kept); });
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(grown));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

at::Generator new_generator(DeviceIndex device) {
  return at::make_generator<Generator>(device < 0 ? current_device() : device, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(DeviceIndex device) {
  static auto* made = [] {
    auto* all = new std::array<at::Generator, MAX_DEVICES>;
    for (DeviceIndex each = 0; each < MAX_DEVICES; each++) (*all)[each] = new_generator(each);
    return all;
  }();
  return (*made)[device < 0 ? current_device() : device];
}

at::Generator host_generator(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}

}  // namespace rehearsal
