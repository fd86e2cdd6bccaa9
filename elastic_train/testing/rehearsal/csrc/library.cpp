// All of it as one translation unit: torch's headers, which take longest, are read once and not nine times.
#include "communicator.cpp"
#include "device.cpp"
#include "memory.cpp"
#include "module.cpp"
#include "operations.cpp"
#include "queues.cpp"
#include "tensors.cpp"
#include "work.cpp"
#include "precision.cpp"  // the last one: it is in torch's namespace as a whole
