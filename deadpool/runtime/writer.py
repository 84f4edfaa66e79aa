"""Writes to the membership store that nobody waits for: acks, faults, finish records.

They are tried again until they are in, or until the generation they belong to is over. One thread, in order.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from deadpool.errors import LeaseLost, MembershipError, StoreUnavailable

logger = logging.getLogger(__name__)

RETRY_S = 0.2
JOIN_TIMEOUT_S = 6.0

_Job = tuple[int, str, Callable[[], object]]


class RegistryWriter:
    """One thread that carries out writes of the current generation.

    Args:
        failed: told of an error that nobody foresaw, from this thread, which then ends: without acks and
            faults this host is of no use to its job.
    """

    def __init__(self, failed: Callable[[str, Exception], None]) -> None:
        self._failed = failed
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._generation = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="registry-writer", daemon=True)
        self._thread.start()

    def set_generation(self, generation: int) -> None:
        """What belongs to older generations is given up."""
        self._generation = max(self._generation, generation)

    def put(self, generation: int, what: str, write: Callable[[], object]) -> None:
        """Queue one write; `what` names it in messages."""
        self._queue.put((generation, what, write))

    def close(self) -> None:
        self._closing.set()
        self._queue.put(None)
        self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            job = self._queue.get()
            if job is None:
                return
            generation, what, write = job
            has_failed = False
            while generation >= self._generation:
                try:
                    write()
                    break
                except (StoreUnavailable, LeaseLost) as error:
                    log = logger.debug if has_failed else logger.warning
                    log("the %s is not written to etcd yet, and tried again: %s", what, error)
                    has_failed = True
                except MembershipError as error:
                    logger.warning("%s was not written: %s", what, error)
                    break
                except Exception as error:  # handed over: a thread that ends in silence is found by nobody
                    self._failed(what, error)
                    return
                if self._closing.wait(RETRY_S):
                    return
