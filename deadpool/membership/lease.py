"""One agent's lease: kept alive, and made anew when the store has forgotten it.

[Note: whose clock ends a lease]
    The store ends a lease TTL seconds after it has HANDLED the last renewal; the agent cannot know when that
    was, only that it was not before the renewal was sent. So the deadline counts from before sending, and on
    CLOCK_BOOTTIME, which goes on while the machine sleeps. Past it the agent must assume that it was
    replaced; what it then does is decided elsewhere (it asks its peers), because etcd being down for all
    looks the same from here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from deadpool.errors import LeaseLost, MembershipError, StoreUnavailable
from deadpool.membership.store import Lease, MembershipStore

_RENEWALS_PER_TTL = 3
_RETRY_PAUSE_S = 0.1
_JOIN_S = 5.0
_log = logging.getLogger(__name__)


def boottime_s() -> float:
    """Seconds on CLOCK_BOOTTIME: it does not stand still while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseKeeper:
    """Grants a lease, enrols with it, and renews it from a thread of its own every third of its TTL.

    When the store says that the lease has ended (etcd was frozen or cut off for longer than the TTL), a new
    one is granted and `enrol(lease, again=True)` is called. If that refuses, the membership is lost for good:
    `on_lost` is called once, on the keeper's thread, and renewing ends.

    Args:
        store: where the lease lives.
        ttl_s: seconds to ask for; `granted_ttl_s` is what counts.
        enrol: writes the keys that live with the lease. StoreUnavailable and LeaseLost are tried again; any
            other MembershipError (as Fenced) is final.
        on_lost: told the error of a refused re-enrolment; must be short.
        clock: CLOCK_BOOTTIME in seconds.
    """

    def __init__(
        self,
        store: MembershipStore,
        ttl_s: float,
        *,
        enrol: Callable[[Lease, bool], None],
        on_lost: Callable[[MembershipError], None],
        clock: Callable[[], float] = boottime_s,
    ) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._enrol = enrol
        self._on_lost = on_lost
        self._clock = clock
        self._lease: Lease | None = None
        self._enrolled = False
        self._lease_until_s = 0.0
        self._deadline_s = 0.0
        self._answered_s = 0.0  # when the last answered renewal was sent
        self._is_failing = False
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)

    @property
    def lease(self) -> Lease:
        """The lease held now; it changes when the store has ended the one before."""
        if self._lease is None:
            raise LeaseLost("no lease was granted yet; start the keeper first")
        return self._lease

    @property
    def granted_ttl_s(self) -> float:
        """What the store granted: etcd raises a TTL shorter than 1.5 times its election timeout."""
        return self.lease.granted_ttl_s

    @property
    def deadline_s(self) -> float:
        """CLOCK_BOOTTIME until which the lease, and what was enrolled with it, surely hold."""
        return self._deadline_s

    @property
    def is_overdue(self) -> bool:
        """Whether the deadline has passed: the store may have ended the lease."""
        return self._clock() >= self._deadline_s

    @property
    def reaches_store(self) -> bool:
        """Whether a renewal sent in the last half TTL was answered.

        Not "the last one was": that stays true while a renewal hangs in a frozen etcd, and an agent whose own
        lease has run out fences itself when a peer says that it still reaches etcd.
        """
        return self._clock() < self._answered_s + self.granted_ttl_s / 2

    def start(self) -> Lease:
        """Grant and enrol now, in the caller's thread; then keep.

        A store that does not answer in time is asked again for one TTL: thousands of hosts start at once.

        Raises:
            MembershipError: granting or enrolling failed; nothing was started, and no lease is left behind.
        """
        give_up_s = self._clock() + self._ttl_s
        while not self._try_to_start(give_up_s):
            self._wake.wait(_RETRY_PAUSE_S)
        self._enrolled = True
        self._deadline_s = self._lease_until_s
        self._thread.start()
        return self.lease

    def _try_to_start(self, give_up_s: float) -> bool:
        try:
            if self._lease is None:
                self._grant()
            self._enrol(self.lease, False)
        except MembershipError as error:
            if isinstance(error, StoreUnavailable) and self._clock() < give_up_s:
                return False
            if self._lease is not None:
                self._revoke()
            raise
        return True

    def renew_now(self) -> None:
        """Renew without waiting for the next turn, as after a hint that etcd is back."""
        self._wake.set()

    def enrol_again(self) -> None:
        """The store shows this member no more, whatever the lease says: enrol anew at once."""
        self._enrolled = False
        self._wake.set()

    def close(self, *, revoke: bool = True) -> None:
        """Stop renewing, and end the lease unless `revoke` is false. Idempotent.

        An unreachable store does not matter: the lease then ends by itself.
        """
        already_closed, self._closing = self._closing, True
        self._wake.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        if revoke and not already_closed and self._lease is not None:
            self._revoke()

    def _run(self) -> None:
        pause_s = self.granted_ttl_s / _RENEWALS_PER_TTL
        while True:
            self._wake.wait(pause_s)
            self._wake.clear()
            if self._closing:
                return
            try:
                self._renew()
            except (StoreUnavailable, LeaseLost) as error:
                if not self._is_failing:
                    _log.warning("the lease is not renewed; it is tried again: %s", error)
                self._is_failing = True
                pause_s = _RETRY_PAUSE_S
            except MembershipError as error:
                self._on_lost(error)
                return
            else:
                self._is_failing = False
                pause_s = self.granted_ttl_s / _RENEWALS_PER_TTL

    def _renew(self) -> None:
        sent_s = self._clock()
        remaining_s = self._store.lease_keepalive(self.lease.id)
        if remaining_s <= 0:
            _log.warning("lease %x has ended; a new one is granted", self.lease.id)
            self._enrolled = False
            self._grant()
        else:
            self._note_answer(sent_s, remaining_s)
        if not self._enrolled:
            self._enrol(self.lease, True)
            self._enrolled = True
            self._deadline_s = self._lease_until_s

    def _grant(self) -> None:
        sent_s = self._clock()
        self._lease = self._store.lease_grant(self._ttl_s)
        self._note_answer(sent_s, self._lease.granted_ttl_s)

    def _note_answer(self, sent_s: float, granted_s: float) -> None:
        self._answered_s = sent_s
        self._lease_until_s = sent_s + granted_s
        if self._enrolled:  # a lease without our keys protects nobody
            self._deadline_s = self._lease_until_s

    def _revoke(self) -> None:
        try:
            self._store.lease_revoke(self.lease.id)
        except StoreUnavailable as error:
            _log.info("the lease is left to end by itself: %s", error)
