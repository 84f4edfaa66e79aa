"""When a job needs one more host. Pure."""

from __future__ import annotations

from deadpool.core.membership_types import State
from deadpool.core.types import Phase


def lacks_spare(state: State, *, had_spare: bool) -> bool:
    """Whether the next loss would find no spare, or a slot waits for one now.

    Args:
        state: of the leader's machine.
        had_spare: whether this job had a spare once. A job that was started without any grows only when a
            slot is vacant, and one whose spares are still on their way does not grow at all.
    """
    view = state.view
    if view is None or view.phase in (Phase.FINISHED, Phase.HALTED) or state.spares:
        return False
    return had_spare or "" in view.slots
