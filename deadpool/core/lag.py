"""Whether steps go on without being protected: the net below the causes that say so themselves.

A rank that cannot be captured and a copy that does not arrive are told at once, with the reason. This asks
only whether steps are finished while none is committed, so it also sees a leader that names nothing, or a
sender that died. Pure.

[Note: what counts] The time in which steps were finished, of each COUNTED_S at most: an evaluation between
two steps, or a job that stands still, leaves nothing more unprotected. Gradients that are carried over steps,
and networks slower than the training, make commits rare for good; so five times what is usual must pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

COUNTED_S = 20.0
LATE_S = 60.0
USUAL_TIMES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How far protection is behind training, as one host sees it.

    Attributes:
        step: newest finished step heard of.
        step_s: when that was.
        delivery_s: what the delivery of a copy may take until its sender itself says that it failed.
        behind_s: time of training since the newest commit.
        usual_s: about what that was when steps were committed.
    """

    step: int
    step_s: float
    delivery_s: float
    behind_s: float = 0.0
    usual_s: float = 0.0

    @property
    def is_late(self) -> bool:
        """Whether somebody should hear of it."""
        return self.behind_s > max(LATE_S + self.delivery_s, USUAL_TIMES * self.usual_s)


def note_finished(lag: Lag, step: int, now_s: float) -> Lag:
    """A step was finished; hearing of it again changes nothing."""
    if step <= lag.step:
        return lag
    counted_s = min(COUNTED_S, now_s - lag.step_s)
    return replace(lag, step=step, step_s=now_s, behind_s=lag.behind_s + counted_s)


def note_committed(lag: Lag) -> Lag:
    """A step was committed. What is usual falls by half at most, so that an outage is soon forgotten."""
    return replace(lag, behind_s=0.0, usual_s=max(lag.behind_s, lag.usual_s / 2))
