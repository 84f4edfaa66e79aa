"""The device after an abort: the order of things, and what is a lost worker."""

from __future__ import annotations

import threading

import pytest

from deadpool.errors import DeviceLost
from deadpool.runtime.device import Cpu, come_to_rest


class TellingDevice:
    """Says what it was asked; may hang, or have a sticky error."""

    def __init__(self, *, hangs: bool = False, error: str = "") -> None:
        self.asked: list[str] = []
        self.released = threading.Event()
        self._error = error
        if not hangs:
            self.released.set()

    def synchronize(self) -> None:
        self.asked.append("synchronize")
        self.released.wait(30)

    def probe(self) -> None:
        self.asked.append("probe")
        if self._error:
            raise RuntimeError(self._error)


def test_the_device_comes_to_rest_and_is_tried_before_captures_are_drained() -> None:
    device = TellingDevice()
    come_to_rest(device, lambda: device.asked.append("drain"), limit_s=10)
    assert device.asked == ["synchronize", "probe", "drain"]


def test_a_device_that_does_not_come_to_rest_is_lost_in_time() -> None:
    device = TellingDevice(hangs=True)
    with pytest.raises(DeviceLost, match=r"did not come to rest within 0\.1 s"):
        come_to_rest(device, lambda: device.asked.append("drain"), limit_s=0.1)
    assert device.asked == ["synchronize"]
    device.released.set()


def test_a_sticky_error_is_a_lost_device_and_is_named() -> None:
    device = TellingDevice(error="an illegal memory access was encountered")
    with pytest.raises(DeviceLost, match="an error that stays: an illegal memory access"):
        come_to_rest(device, lambda: device.asked.append("drain"), limit_s=10)
    assert "drain" not in device.asked


def test_a_cpu_is_always_at_rest() -> None:
    drained = []
    come_to_rest(Cpu(), lambda: drained.append(True), limit_s=10)
    assert drained == [True]
