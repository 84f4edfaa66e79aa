"""Sockets of this process, the worker page, and the thread that hears the agent."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import select
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from deadpool.errors import ExitCode

PAGE_BYTES = 65536
_TICK_WORD, _CLOSED_WORD, _COUNT_WORD = 1, 2, 9
_ENTRIES_WORD, _ENTRY_WORDS = 512, 4
_BYTES_BITS = 48
_MAX_ENTRIES = (PAGE_BYTES // 8 - _ENTRIES_WORD) // _ENTRY_WORDS

_TICK_MS = 50  # the agent expects a tick at least every 100 ms
_FRAME = struct.Struct("<QQ")
_CLOSE, _CLOSED = 1, 2
_STOP_S = 2.0


# ---- sockets ----


def socket_inode(fd: int) -> int:
    """Inode of one socket; 0 if `fd` is none."""
    try:
        info = os.fstat(fd)
    except OSError:
        return 0
    return info.st_ino if stat.S_ISSOCK(info.st_mode) else 0


def tcp_sockets() -> set[int]:
    """Inodes of all TCP sockets of this process."""
    return {inode for fd in _open_fds() if (inode := socket_inode(fd)) and _is_tcp(fd)}


def shutdown_sockets(inodes: Iterable[int]) -> None:
    """End the receiving side of every connected socket in `inodes`.

    Not SHUT_RDWR, and no listening socket: see csrc/sockets.h.
    """
    wanted = set(inodes)
    if not wanted:
        return
    for fd in _open_fds():
        if socket_inode(fd) not in wanted:
            continue
        with contextlib.suppress(OSError):  # closed meanwhile by its owner
            with socket.socket(fileno=os.dup(fd)) as held:  # the number may be used anew: look again
                is_listening = held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if socket_inode(held.fileno()) in wanted and not is_listening:
                    held.shutdown(socket.SHUT_RD)


def _open_fds() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _is_tcp(fd: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(fd)) as held:
            return held.family in (socket.AF_INET, socket.AF_INET6) and held.type == socket.SOCK_STREAM
    except OSError:
        return False


# ---- the worker page ----


def name_hash(name: str) -> int:
    """FNV-1a, 64 bits."""
    hashed = 0xCBF29CE484222325
    for byte in name.encode():
        hashed = ((hashed ^ byte) * 0x100000001B3) & (2**64 - 1)
    return hashed


@dataclass(slots=True)
class Entry:
    """Counters of one handle, in the page's words. Counted by any thread."""

    words: memoryview  # of u64: hash of the name, issued, completed, the newest call
    lock: threading.Lock

    @classmethod
    def private(cls) -> Entry:
        """Counters that the agent does not see."""
        return cls(memoryview(bytearray(8 * _ENTRY_WORDS)).cast("Q"), threading.Lock())

    def issue(self, op: str, nbytes: int) -> None:
        with self.lock:
            self.words[1] += 1
            self.words[3] = (name_hash(op) & 0xFFFF) << _BYTES_BITS | min(nbytes, (1 << _BYTES_BITS) - 1)

    def complete(self) -> None:
        with self.lock:
            self.words[2] += 1

    def reset(self) -> None:
        with self.lock:
            self.words[1] = self.words[2] = 0


class WorkerPage:
    """The page shared with the agent; layout in csrc/page.h."""

    def __init__(self) -> None:
        self.map(-1)

    def map(self, fd: int) -> None:
        """Use the page behind `fd`; negative: private memory. Older pages stay mapped for works in flight."""
        self._words = memoryview(mmap.mmap(fd, PAGE_BYTES)).cast("Q")
        self._used = itertools.count()

    def tick(self) -> None:
        self._words[_TICK_WORD] += 1

    def set_closed_generation(self, generation: int) -> None:
        self._words[_CLOSED_WORD] = generation

    def add_entry(self, name: str) -> Entry:
        index = next(self._used)
        if index >= _MAX_ENTRIES:  # works, unseen by the agent
            return Entry.private()
        first = _ENTRIES_WORD + index * _ENTRY_WORDS
        entry = Entry(self._words[first : first + _ENTRY_WORDS], threading.Lock())
        entry.reset()
        entry.words[0] = name_hash(name)
        self._words[_COUNT_WORD] = index + 1  # last: the agent reads only entries below the count
        return entry

    def clear_entries(self) -> None:
        self._words[_COUNT_WORD] = 0
        self._used = itertools.count()


page = WorkerPage()


# ---- the agent ----


class Listener:
    """Ticks in the page, obeys CLOSE from the agent, and ends the process when the agent is gone.

    Args:
        close: closes handles of generations up to its argument.
        fail_blocked: afterwards: fails what is still blocked.
    """

    def __init__(self, close: Callable[[int], None], fail_blocked: Callable[[int], None]) -> None:
        self._close = close
        self._fail_blocked = fail_blocked
        self._thread: threading.Thread | None = None
        self._channel: socket.socket | None = None
        self._wake = -1
        self._pid = 0

    def is_running(self) -> bool:
        return self._thread is not None

    def start(self, close_fd: int) -> None:
        """Listen on a duplicate of `close_fd`; negative: keep the channel that there is, or only tick."""
        if self._thread is not None:
            current = -1 if self._channel is None else self._channel.fileno()
            if close_fd < 0 or socket_inode(close_fd) == socket_inode(current):
                return
            self.stop()
        self._channel = None if close_fd < 0 else socket.socket(fileno=os.dup(close_fd))
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=self._run, args=(self._channel, self._wake), name="dp-listener", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Join; harmless when not started, or in a forked child."""
        if self._thread is None or self._pid != os.getpid():
            return
        os.eventfd_write(self._wake, 1)
        self._thread.join(_STOP_S)
        self._thread = None
        os.close(self._wake)
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _run(self, channel: socket.socket | None, wake: int) -> None:
        poller = select.poll()
        poller.register(wake, select.POLLIN)
        if channel is not None:
            poller.register(channel, select.POLLIN)
        while True:
            page.tick()
            ready = {fd for fd, _ in poller.poll(_TICK_MS)}
            if wake in ready:
                return
            if channel is None or not ready:
                continue
            try:
                frame = channel.recv(_FRAME.size, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError:
                frame = b""
            if not frame:
                os._exit(int(ExitCode.REPLACED))  # the agent is gone: host loss, and nothing may be written
            if len(frame) != _FRAME.size:
                continue
            kind, generation = _FRAME.unpack(frame)
            if kind == _CLOSE:
                # On a thread of its own, so that ticks and the end of the channel are not held up.
                threading.Thread(
                    target=self._obey, args=(channel, generation), name="dp-close", daemon=True
                ).start()

    def _obey(self, channel: socket.socket, generation: int) -> None:
        self._close(generation)
        with contextlib.suppress(OSError):
            channel.send(_FRAME.pack(_CLOSED, generation))
        self._fail_blocked(generation)
