"""When a host whose lease has run out must end: it alone is cut off, not all of them. Has no clock."""

from __future__ import annotations

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
