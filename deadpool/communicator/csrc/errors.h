// The exception of a closed handle; becomes deadpool.errors.CollectiveAborted in Python from any thread.
#pragma once

#include <torch/csrc/Exceptions.h>

#include <cstdint>
#include <string>

namespace deadpool {

// A PyTorchError, because errors that cross the autograd engine reach Python through torch's own handlers, not pybind's.
struct CollectiveAborted : torch::PyTorchError {
  using torch::PyTorchError::PyTorchError;
  PyObject* python_type() override;
};

// Call once with the GIL held; keeps the type for ever.
void register_errors();

// Text of the exception being handled.
std::string current_message();

[[noreturn]] void throw_aborted(const std::string& handle, uint64_t generation, const std::string& why);

}  // namespace deadpool
