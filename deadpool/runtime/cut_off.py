"""When a host must end because the control plane is away: for it alone, or for all of them. Has no clock."""

from __future__ import annotations

from collections.abc import Sequence

from deadpool.core.types import Phase, View

_LATE_S = 1.0
"""Between two looks of an agent that is awake there are 0.1 s."""


class CutOff:
    """Judges one host from what it knows of itself and hears of its peers.

    [Note: etcd returns] Hosts find out one after the other that etcd answers again: the first one says that
    it reaches etcd while the leases of others are still overdue. They get `grace_s` for their own renewal. A
    host that really is cut off does no harm meanwhile: the others have begun a generation without it.

    [Note: this host slept] A host that was suspended, or starved, wakes with an overdue lease, and has read
    nothing that its peers sent meanwhile. It gets the same grace from then on.

    Args:
        grace_s: how long this host may be overdue after it woke, and while a peer reaches etcd.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._since_s: float | None = None  # since when this host is overdue and a peer reaches etcd
        self._last_s: float | None = None
        self._woke_s = float("-inf")

    def judge(self, is_overdue: bool, peers: tuple[bool, bool], now_s: float) -> str:
        """Why this host must end now; "" if it need not.

        Args:
            is_overdue: its own lease may have ended.
            peers: (some peer was heard lately, some peer that was heard lately reaches etcd).
            now_s: monotonic.
        """
        is_heard, peer_reaches = peers
        if self._last_s is not None and now_s - self._last_s > _LATE_S:
            self._woke_s, self._since_s = now_s, None
        self._last_s = now_s
        is_awake = now_s - self._woke_s >= self._grace_s
        if not (is_overdue and peer_reaches):
            self._since_s = None
            if is_overdue and not is_heard and is_awake:
                return "its lease ran out and it reaches neither the control plane nor a peer"
            return ""
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s < self._grace_s:
            return ""
        return "its lease ran out while peers reach the control plane"


class Stranded:
    """Judges whether this host waits for a control plane that stays away.

    No job forms and no recovery ends without one. That a recovery cannot even begin is told by a fault that
    this host has reported, or by ranks that stand still, while its workers finish no step: what a fault was
    about may also be over, and training go on.

    Args:
        limit_s: how long it may wait.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since_s: float | None = None
        self._steps: Sequence[int] = ()

    def judge(
        self, view: View | None, is_reached: bool, needs_view: bool, steps: Sequence[int], now_s: float
    ) -> bool:
        """Whether it has waited too long.

        Args:
            view: the one that this host obeys.
            is_reached: whether the control plane answers.
            needs_view: while RUNNING: whether nothing happens before another View.
            steps: that the workers of this host have finished.
            now_s: monotonic.
        """
        is_running = view is not None and view.phase is Phase.RUNNING
        has_ended = view is not None and view.phase in (Phase.FINISHED, Phase.HALTED)
        trains = is_running and (not needs_view or steps != self._steps)
        self._steps = steps
        if is_reached or has_ended or trains or self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s > self._limit_s
