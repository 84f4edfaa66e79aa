"""The device after an abort: it must come to rest and still compute. Otherwise this worker is lost.

The CPU runs ahead of a GPU. When handles are closed, an optimizer and a capture may be enqueued behind a
collective that will never have a result; once that is aborted, they run on garbage. So the order is: handles
closed, captures frozen, communicators aborted (all three in csrc/registry.cpp), and only then what is here:
device, captures, ack.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch

from deadpool.errors import DeviceLost


class Device(Protocol):
    """Where this rank computes."""

    def synchronize(self) -> None:
        """Return when all that was enqueued has run. May block for ever, and raise what the device says."""

    def probe(self) -> None:
        """Compute something whose result is known. A sticky error is raised here at the latest."""


class Cpu:
    """Nothing runs ahead."""

    def synchronize(self) -> None: ...

    def probe(self) -> None: ...


class Cuda:
    """The current CUDA device."""

    def __init__(self) -> None:
        self._index = torch.cuda.current_device()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._index)

    def probe(self) -> None:
        # torch asks for the last error after each launch, and the value is read back: a sticky error raises.
        total = torch.ones(64, device=f"cuda:{self._index}").sum().item()
        if total != 64.0:
            raise RuntimeError(f"the sum of 64 ones is {total}")


def find_device() -> Device:
    """The device of this process."""
    return Cuda() if torch.cuda.is_available() else Cpu()


def come_to_rest(device: Device, drain: Callable[[], None], *, limit_s: float) -> None:
    """Wait for the device, try it, and drain the captures, in this order.

    Call it after the communicators were aborted.

    Args:
        device: of this rank.
        drain: lets captures end; they are frozen already, so none of them counts.
        limit_s: how long the device may take; below the agent's own limit for an abort.

    Raises:
        DeviceLost: it does not come to rest, or has a sticky error: no later call of this process succeeds.
    """
    errors: list[Exception] = []

    def settle() -> None:
        try:
            device.synchronize()
            device.probe()
        except Exception as error:  # whatever the driver says ends this worker, by name
            errors.append(error)

    # On a thread of its own: a synchronisation cannot be interrupted.
    settling = threading.Thread(target=settle, name="deadpool-device", daemon=True)
    settling.start()
    settling.join(limit_s)
    if settling.is_alive():
        raise DeviceLost(f"the device did not come to rest within {limit_s:g} s after the abort")
    if errors:
        raise DeviceLost(f"the device has an error that stays: {errors[0]}") from errors[0]
    drain()
