"""A job of a few hosts, driven by events one at a time."""

from __future__ import annotations

from dataclasses import replace

from deadpool.core.membership import (
    Acked,
    AllWait,
    Effect,
    End,
    Event,
    FaultReported,
    Fence,
    LeaderElected,
    LeaseExpired,
    Limits,
    MemberJoined,
    PublishView,
    SilencesHeard,
    State,
    Tick,
    initial_state,
    step,
)
from deadpool.core.types import (
    Ack,
    Fault,
    FaultKind,
    Inventory,
    Name,
    Phase,
    RankCopies,
    View,
)
from deadpool.testing.membership_world import make_member

LIMITS = Limits(
    lease_ttl_s=5, suspect_s=2, abort_s=50, restore_s=40, spare_wait_s=100, forming_s=60, only_copy_extra_s=60
)
FIVE = Name(step=5, generation=1)


class Job:
    """A job of three hosts of one rank, driven by events."""

    def __init__(self, *, slots: int = 3, nproc: int = 1, spares: int = 0) -> None:
        self.state: State = initial_state(replace(LIMITS, spares=spares), slots, nproc)
        self.now_s = 0.0
        self.effects: tuple[Effect, ...] = ()
        self.feed(LeaderElected(view=None, members=(), now_s=0.0))

    @classmethod
    def running(cls, *, spares: int = 1, slots: int = 3) -> Job:
        job = cls(slots=slots)
        for index in range(slots + spares):
            job.join(index)
        job.ack(*range(slots))
        assert job.view.phase is Phase.RUNNING
        return job

    def feed(self, event: Event) -> None:
        self.state, self.effects = step(self.state, event)

    @property
    def view(self) -> View:
        assert self.state.view is not None
        return self.state.view

    @property
    def published(self) -> list[Phase]:
        return [effect.view.phase for effect in self.effects if isinstance(effect, PublishView)]

    @property
    def fenced(self) -> dict[str, bool]:
        return {effect.member_id: effect.quarantine for effect in self.effects if isinstance(effect, Fence)}

    @property
    def exit_code(self) -> int | None:
        return next((effect.exit_code for effect in self.effects if isinstance(effect, End)), None)

    def join(self, index: int, **more: object) -> None:
        self.feed(MemberJoined(member=make_member(index, self.state.nproc, **more), now_s=self.now_s))

    def lose(self, *indices: int) -> None:
        for index in indices:
            self.feed(LeaseExpired(member_id=f"m{index}", now_s=self.now_s))

    def silence(self, index: int, *observers: int) -> None:
        for observer in observers:
            self.feed(SilencesHeard(observer=f"m{observer}", silent=(f"m{index}",), now_s=self.now_s))

    def hears_nothing_of(self, observer: int, *indices: int) -> None:
        """All that one observer says."""
        silent = tuple(f"m{index}" for index in indices)
        self.feed(SilencesHeard(observer=f"m{observer}", silent=silent, now_s=self.now_s))

    def all_wait(self, generation: int | None = None) -> None:
        current = self.view.generation if generation is None else generation
        self.feed(AllWait(generation=current, step=6, now_s=self.now_s))

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.feed(Tick(now_s=self.now_s))

    def fault(self, kind: FaultKind, index: int, *, step: int = 6, detail: str = "", **more: object) -> None:
        ranks = (self.view.slots.index(f"m{index}"),) if f"m{index}" in self.view.slots else ()
        fault = Fault(
            kind=kind,
            member=f"m{index}",
            generation=self.view.generation,
            ranks=ranks,
            step=step,
            detail=detail,
        )
        self.feed(FaultReported(fault=replace(fault, **more), now_s=self.now_s))  # type: ignore[arg-type]

    def ack(
        self, *indices: int, name: Name = FIVE, lost: tuple[int, ...] = (), restore_extra_s: float = 0.0
    ) -> None:
        """Acks of the current phase; each host has its own copy of `name` and that of the slot before."""
        phase, generation = self.view.phase, self.view.generation
        for index in indices:
            inventory = None
            if phase is Phase.ABORTING:
                inventory = self.inventory(index, name)
            ack = Ack(
                member=f"m{index}",
                generation=generation,
                phase=phase,
                inventory=inventory,
                lost_ranks=lost,
                last_step=6,
                restore_extra_s=restore_extra_s,
            )
            self.feed(Acked(ack=ack, now_s=self.now_s))

    def inventory(self, index: int, name: Name) -> Inventory:
        member = f"m{index}"
        if member not in self.view.slots:  # leaving: it had slot `index`
            slot = index
        else:
            slot = self.view.slots.index(member)
        before = (slot - 1) % len(self.view.slots)
        copies = (RankCopies(rank=slot, own=(name,)), RankCopies(rank=before, held=(name,)))
        return Inventory(member=member, copies=tuple(sorted(copies, key=lambda c: c.rank)))
