// Python names of the extension; see deadpool/communicator/_native.pyi for their contract.
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "backend.h"
#include "errors.h"
#include "listener.h"
#include "page.h"
#include "registry.h"
#include "work.h"

#include <torch/version.h>

namespace deadpool {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using Handle = c10::intrusive_ptr<SwapBackend>;

const char* outcome_name(Build::Outcome outcome) {
  switch (outcome) {
    case Build::Outcome::kDone:
      return "done";
    case Build::Outcome::kFailed:
      return "failed";
    case Build::Outcome::kClosed:
      return "closed";
    case Build::Outcome::kRunning:
      break;
  }
  return "running";
}

void bind_handle(py::module_& module) {
  py::class_<SwapBackend, Handle, c10d::Backend>(module, "SwapBackend")
      .def(
          py::init([](int rank, int size, const std::string& kind, const c10::intrusive_ptr<c10d::Backend::Options>& options) {
            auto handle = c10::make_intrusive<SwapBackend>(rank, size, kind, options);
            Registry::get().add(handle);
            return handle;
          }),
          py::arg("rank"),
          py::arg("size"),
          py::arg("kind"),
          py::arg("options"))
      .def("set_name", &SwapBackend::set_name, py::arg("name"))
      .def("set_nccl_raw", &SwapBackend::set_nccl_raw, py::arg("address"))
      .def("set_tap", &SwapBackend::set_tap, py::arg("tap").none(true))
      .def(
          "inner",
          [](const Handle& handle) -> std::optional<BackendPtr> {
            auto inner = handle->peek_inner();
            return inner ? std::optional<BackendPtr>(inner) : std::nullopt;
          })
      .def_property_readonly("options", &SwapBackend::getBackendOptions)
      .def_property_readonly("handle_name", &SwapBackend::name)
      .def_property_readonly("kind", &SwapBackend::kind)
      .def_property_readonly("generation", &SwapBackend::generation)
      .def_property_readonly("is_shut_down", &SwapBackend::is_shut_down)
      .def_property_readonly("issued", &SwapBackend::issued)
      .def_property_readonly("completed", &SwapBackend::completed);
}

void bind_build(py::module_& module) {
  py::class_<Build, std::shared_ptr<Build>>(module, "Build")
      .def(py::init<uint64_t>(), py::arg("generation"))
      .def("begin", &Build::begin, py::arg("handle_name"), NoGil())
      .def(
          "install",
          [](Build& build, const Handle& handle, const BackendPtr& communicator) { build.install(*handle, communicator); },
          py::arg("handle"),
          py::arg("communicator"),
          NoGil())
      .def("finish", &Build::finish, py::arg("succeeded"), NoGil())
      .def(
          "wait",
          [](Build& build, double timeout_s) { return outcome_name(build.wait(timeout_s)); },
          py::arg("timeout_s"),
          NoGil())
      .def("abandon", &Build::abandon, NoGil())
      .def_property_readonly("generation", &Build::generation);
}

void bind_registry(py::module_& module) {
  module.def("open", [](uint64_t generation) { Registry::get().open(generation); }, py::arg("generation"));
  module.def(
      "close",
      [](uint64_t generation) {
        Registry::get().close(generation);
        BlockedCalls::get().fail_all(generation);
      },
      py::arg("generation"),
      NoGil());
  module.def("closed_generation", [] { return Registry::get().closed_generation(); });
  module.def("opened_generation", [] { return Registry::get().opened_generation(); });
  module.def("is_closed", [] { return Registry::get().is_closed(); });
  module.def("handles", [] { return Registry::get().handles(); });
  module.def("reap", [] { return Registry::get().reap(); }, NoGil());
  module.def("free_nccl", [] { Registry::get().free_nccl(); }, NoGil());
  module.def("reset_generations", [] { Registry::get().reset_generations(); });
  module.def(
      "add_store_socket",
      [](int fd, uint64_t generation) { Registry::get().add_store_socket(fd, generation); },
      py::arg("fd"),
      py::arg("generation"));
  module.def("remove_store_socket", [](int fd) { Registry::get().remove_store_socket(fd); }, py::arg("fd"), NoGil());
}

}  // namespace
}  // namespace deadpool

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace deadpool;
  py::module_::import("torch._C._distributed_c10d");  // defines the base classes
  register_errors();
  module.attr("torch_version") = TORCH_VERSION;
  bind_handle(module);
  bind_build(module);
  bind_registry(module);
  module.def("map_page", [](int fd) { WorkerPage::get().map(fd); }, py::arg("fd"));
  module.def("clear_entries", [] { WorkerPage::get().clear_entries(); });
  module.def("name_hash", &name_hash, py::arg("name"));
  module.def("start_listener", [](int close_fd) { Listener::get().start(close_fd); }, py::arg("close_fd"));
  module.def("stop_listener", [] { Listener::get().stop(); }, NoGil());
  module.def("is_listening", [] { return Listener::get().is_running(); });
  module.def(
      "watch_work",
      [](const WorkPtr& work, py::object done) -> WorkPtr { return c10::make_intrusive<WatchedWork>(work, std::move(done)); },
      py::arg("work"),
      py::arg("done"));
  module.def(
      "done_work",
      [](std::vector<at::Tensor> outputs, int source_rank) -> WorkPtr {
        return c10::make_intrusive<DoneWork>(std::move(outputs), source_rank);
      },
      py::arg("outputs"),
      py::arg("source_rank") = -1);
  py::module_::import("atexit").attr("register")(module.attr("stop_listener"));
}
