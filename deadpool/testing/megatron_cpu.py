"""Lets unmodified megatron-core train on a CPU with gloo: for tests, and for a look without a GPU.

megatron-core names the device "cuda" in constructors, asks tensors whether they are `torch.cuda.FloatTensor`,
and seeds the device's generator. `install()` answers all of that from the CPU. Nothing of megatron-core is
changed except one function that writes a device's generator. Never use it beside a real GPU.

What is replaced, and who asks for it (megatron-core 0.16.1):

| name | asked by |
|---|---|
| `torch.cuda.current_device`, `synchronize` | param_and_grad_buffer, p2p_communication |
| `torch.cuda.current_stream` | param_and_grad_buffer (0.17 and later) |
| `torch.cuda.get_rng_state`, `set_rng_state`, `manual_seed` | tensor_parallel.random |
| `tensor_parallel.random._set_cuda_rng_state` | its own generator tracker |
| `device="cuda"`, `Tensor.cuda()`, `Tensor.to("cuda")` | schedules, optimizer, clip_grads, grad_scaler |
| `Tensor.type()` | the optimizers, which look for "torch.cuda.FloatTensor" |
| `torch.compile` | fused kernels; loading the compiler takes 4 s per process |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from deadpool.errors import IntegrationError

_CPU = torch.device("cpu")

_installed: ExitStack | None = None


def install() -> None:
    """Answer for the device from now on, in this thread. Call before megatron is imported; twice is once.

    Raises:
        IntegrationError: this machine has a GPU.
    """
    global _installed
    if torch.cuda.is_available():
        raise IntegrationError("megatron_cpu stands in for a device; this machine has one, so leave it out")
    if _installed is not None:
        return
    with ExitStack() as stack:
        _replace(stack, torch.cuda, "current_device", lambda: _CPU)
        _replace(stack, torch.cuda, "synchronize", lambda device=None: None)
        _replace(stack, torch.cuda, "current_stream", lambda device=None: _Stream())
        _replace(stack, torch.cuda, "manual_seed", lambda seed: torch.default_generator.manual_seed(seed))
        for module in (torch.cuda, torch.cuda.random):
            _replace(stack, module, "get_rng_state", lambda device="cuda": torch.get_rng_state())
            _replace(stack, module, "set_rng_state", lambda state, device="cuda": torch.set_rng_state(state))
        _replace(stack, torch, "compile", _leave_as_it_is)
        mode: Any = _CpuForCuda()
        stack.enter_context(mode)
        tracker = import_module("megatron.core.tensor_parallel.random")  # now that nothing compiles
        _replace(stack, tracker, "_set_cuda_rng_state", lambda state, **_: torch.set_rng_state(state))
        _installed = stack.pop_all()


def remove() -> None:
    """Put everything back that `install` replaced."""
    global _installed
    if _installed is not None:
        _installed.close()
        _installed = None


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _leave_as_it_is(model: Callable[..., Any] | None = None, **_: Any) -> Any:
    """`torch.compile`, as a function and as a decorator with arguments."""
    return model if model is not None else lambda function: function


class _Stream:
    """The one stream of a CPU: everything on it has happened."""

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...


class _CpuForCuda(TorchFunctionMode):
    """Every call of torch in this thread, with the device replaced."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")
