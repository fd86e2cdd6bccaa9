// What Python sees.
#include "device.h"

#include <torch/csrc/utils/pybind.h>

namespace rehearsal {
void define_communicator(pybind11::module_& module);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace py = pybind11;
  using namespace rehearsal;
  module.def("set_device_count", &set_device_count);
  module.def("device_count", &device_count);
  module.def("current_device", &current_device);
  module.def("set_device", &set_current_device);
  module.def("set_limit", &set_limit, py::arg("device"), py::arg("nbytes"));
  module.def("fail", &fail, py::arg("device"));
  module.def("set_delay", &set_delay, py::arg("seconds"), py::arg("seed"));
  module.def("hold", &hold, py::arg("device"), py::arg("stream"), py::arg("held"));
  module.def("default_generator", [](c10::DeviceIndex device) { return default_generator(device); });
  define_communicator(module);
  module.def("pin", [](uintptr_t address, size_t bytes) { pin(reinterpret_cast<void*>(address), bytes); });
  module.def("unpin", [](uintptr_t address) { return unpin(reinterpret_cast<void*>(address)); });
}
