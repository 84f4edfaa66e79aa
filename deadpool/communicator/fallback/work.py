"""Works handed to callers; as csrc/work.h."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.futures import Future

from deadpool.communicator.fallback.process import Entry
from deadpool.communicator.fallback.registry import GRACE_S, raise_aborted, registry

_NO_TIMEOUT = timedelta(0)
_LOOK_S = 0.02
_FORGOTTEN = "the collective was aborted (it did not end)"


class _ForwardWork(c10d.Work):
    """Forwards everything to `inner`."""

    def __init__(self, inner: c10d.Work) -> None:
        super().__init__()
        self._inner = inner

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def is_success(self) -> bool:
        return self._inner.is_success()

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> list[torch.Tensor]:
        return self._inner.result()

    def source_rank(self) -> int:
        return self._inner._source_rank()

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return self._inner.wait(timeout)

    def get_future(self) -> Any:
        return self._inner.get_future()


class SwapWork(_ForwardWork):
    """The work of a live collective; see csrc/work.h, [Note: operations that gloo forgets].

    Nobody waits inside gloo without end: a wait sleeps on an event, which the future of the operation sets,
    or, where there is none, a thread that waits in its stead.
    """

    def __init__(self, inner: c10d.Work, handle: str, generation: int, entry: Entry) -> None:
        super().__init__(inner)
        self._handle = handle
        self._generation = generation
        self._entry = entry
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._watched = False
        self._outer: Any = None
        try:
            future = inner.get_future()
        except RuntimeError:
            return  # torch has none for sends, receives and reduce-scatter
        self._watched = True
        future.add_done_callback(lambda ended: self._end(ended.value))

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        if not self._watched:
            self._watched = True
            threading.Thread(target=self._end, args=(self._inner.wait,), name="dp-wait", daemon=True).start()
        begin_s, closed_s = time.monotonic(), None
        while not self._ended.wait(_LOOK_S):
            now_s = time.monotonic()
            if timeout != _NO_TIMEOUT and now_s - begin_s >= timeout.total_seconds():
                raise RuntimeError("Operation timed out!")
            if closed_s is None and self._is_closed():
                closed_s = now_s
            if closed_s is not None and now_s - closed_s >= GRACE_S:
                raise_aborted(self._handle, self._generation, _FORGOTTEN)
        if self._error is None:
            return True
        if self._is_closed():
            raise_aborted(self._handle, self._generation, f"the collective was aborted ({self._error})")
        raise self._error

    def get_future(self) -> Any:
        if self._outer is not None:
            return self._outer
        inner = self._inner.get_future()
        ended: Future[Any] = Future()
        # Its own set_exception would hide the error in a value that DDP's reducer takes for tensors: a crash.
        # What a callback raises becomes an error for C++, too; as a RuntimeError with the text of this one.
        self._outer = ended.then(_raise_or_return)
        once = threading.Lock()  # the operation and a close may both want to end it: taken by the first

        def fail() -> None:
            if once.acquire(blocking=False):
                ended.set_result(self._aborted(_FORGOTTEN))

        number = registry.add_blocked(self._generation, fail)

        def complete(future: Any) -> None:
            registry.remove_blocked(number)
            if not once.acquire(blocking=False):
                return
            try:
                result = future.value()
            except Exception as error:
                text = f"the collective was aborted ({error})"
                result = self._aborted(text) if self._is_closed() else error
            ended.set_result(result)

        inner.add_done_callback(complete)
        if self._is_closed() and not inner.done():
            fail()  # whoever closed may have looked at the list before
        return self._outer

    def _end(self, ask: Callable[[], object]) -> None:
        """Note how the operation ended: `ask` returns then, or raises its error."""
        try:
            ask()
        except Exception as error:
            self._error = error
        else:
            self._entry.complete()
        self._ended.set()

    def _is_closed(self) -> bool:
        return self._generation <= registry.closed_generation()

    def _aborted(self, why: str) -> Exception:
        try:
            raise_aborted(self._handle, self._generation, why)
        except Exception as error:
            return error


def _raise_or_return(ended: Future[Any]) -> Any:
    value = ended.value()
    if isinstance(value, Exception):
        raise value
    return value


class WatchedWork(_ForwardWork):
    """Calls `done(source rank)` once, after the inner work succeeded and before its waiter goes on."""

    def __init__(self, inner: c10d.Work, done: Callable[[int], None]) -> None:
        super().__init__(inner)
        self._done: Callable[[int], None] | None = done

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        succeeded = self._inner.wait(timeout)
        done, self._done = self._done, None
        if done is not None:
            try:
                source = self._inner._source_rank()
            except RuntimeError:  # only a receive from any rank has one
                source = -1
            done(source)
        return succeeded

    def get_future(self) -> Any:
        self.wait()
        return self._inner.get_future()


class DoneWork(c10d.Work):
    """A work that is complete from the start: a replayed collective."""

    def __init__(self, outputs: Sequence[torch.Tensor], source_rank: int) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self._source = source_rank

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def synchronize(self) -> None:
        pass

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return True

    def get_future(self) -> Any:
        future: Future[list[torch.Tensor]] = Future()
        future.set_result(self._outputs)
        return future
