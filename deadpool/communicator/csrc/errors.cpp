#include "errors.h"

#include <torch/csrc/utils/pybind.h>

namespace deadpool {
namespace {
PyObject* collective_aborted = nullptr;
}

PyObject* CollectiveAborted::python_type() {
  return collective_aborted;
}

void register_errors() {
  collective_aborted = py::object(py::module_::import("deadpool.errors").attr("CollectiveAborted")).release().ptr();
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) {
        std::rethrow_exception(pointer);
      }
    } catch (const CollectiveAborted& error) {
      PyErr_SetString(collective_aborted, error.what());
    }
  });
}

std::string current_message() {
  try {
    throw;
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "unknown error";
  }
}

void throw_aborted(const std::string& handle, uint64_t generation, const std::string& why) {
  throw CollectiveAborted(
      "group '" + handle + "', generation " + std::to_string(generation) + ": " + why +
      "; it works again once the next generation is open");
}

}  // namespace deadpool
