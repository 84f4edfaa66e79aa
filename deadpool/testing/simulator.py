"""Simulates a job of any size in virtual time: seed in, trace out.

The leader's machine is the core's, unchanged. Hosts answer Views after random delays, die, stop, lose
workers, come back; training goes on only while every rank takes part. The oracle sees every View. The same
setup gives the same digest.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from deadpool.core.membership import (
    Acked,
    Event,
    FaultReported,
    Fence,
    Finished,
    LeaderElected,
    LeaseExpired,
    MemberJoined,
    PublishView,
    SilencesHeard,
    State,
    Tick,
    initial_state,
    step,
)
from deadpool.core.placement import Placement
from deadpool.core.types import (
    Ack,
    Fault,
    FaultKind,
    Inventory,
    Member,
    MemberId,
    Name,
    Phase,
    RankCopies,
    View,
)
from deadpool.testing.oracle import Truth, check_step
from deadpool.testing.simulation import Happening, Injection, Result, Setup, Target

SILENCE_DEAD_S = 3.0
PROGRESS_TIMEOUT_S = 10.0
REBUILD_LIMIT_S = 30.0


@dataclass(slots=True)
class _Host:
    member: Member
    is_alive: bool = True
    is_responsive: bool = True
    is_worker_lost: bool = False
    has_state: bool = False
    holds: frozenset[int] = frozenset()  # slots whose copies are complete here


def simulate(setup: Setup, *, max_virtual_s: float = 1e6) -> Result:
    """Run the job to its end.

    Raises:
        OracleViolation: an invariant does not hold.
        TimeoutError: the job did not end within `max_virtual_s`.
    """
    return _Simulation(setup).run(max_virtual_s)


class _Simulation:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.random = random.Random(setup.seed)
        self.now_s = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.events = 0
        self.hosts: dict[MemberId, _Host] = {}
        self.state: State = initial_state(setup.limits, setup.hosts, setup.nproc)
        self.acks: list[Ack] = []
        self.replaceable: set[MemberId] = set()
        self.dead: set[MemberId] = set()
        self.unreachable: set[MemberId] = set()
        self.holders_of: Placement = ()
        self.held_by: dict[int, set[int]] = {}
        self.step = 0
        self.name = Name(step=0, generation=1)  # newest one that all ranks have
        self.protected: Name | None = None
        self.lost_since = 0
        self.lost_steps = 0
        self.recoveries_s: list[float] = []
        self.abort_began_s: float | None = None
        self.injections = list(setup.injections)
        self.last_slot: dict[MemberId, int] = {}
        self.hash = hashlib.sha256()

    # --- The run ---

    def run(self, max_virtual_s: float) -> Result:
        members = tuple(self.new_host() for _ in range(self.setup.hosts + self.setup.spares))
        time_s = 0.0
        for _ in range(self.setup.losses):
            time_s += self.random.expovariate(1 / self.setup.loss_mean_s)
            self.at(time_s, self.lose_any_host)
        for arrival_s in self.setup.arrivals_s:
            self.at(arrival_s, self.join)
        self.feed(LeaderElected(view=None, members=members, now_s=0.0))
        while self.queue and self.view.phase not in (Phase.FINISHED, Phase.HALTED):
            self.now_s, _, action = heapq.heappop(self.queue)
            if self.now_s > max_virtual_s:
                raise TimeoutError(f"still {self.view.phase} after {max_virtual_s} s: {self.view}")
            action()
        if self.view.phase not in (Phase.FINISHED, Phase.HALTED):
            raise TimeoutError(f"nothing is left to happen in {self.view}")
        return Result(
            phase=self.view.phase,
            exit_code=self.view.exit_code,
            reason=self.view.reason,
            generation=self.view.generation,
            events=self.events,
            virtual_s=self.now_s,
            recoveries_s=tuple(self.recoveries_s),
            lost_steps=self.lost_steps,
            injected=len(self.setup.injections) - len(self.injections),
            digest=self.hash.hexdigest()[:16],
        )

    @property
    def view(self) -> View:
        assert self.state.view is not None
        return self.state.view

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.queue, (time_s, self.count, action))

    def after(self, low_s: float, high_s: float, action: Callable[[], None]) -> None:
        self.at(self.now_s + self.random.uniform(low_s, high_s), action)

    def feed(self, event: Event) -> None:
        self.events += 1
        before = self.state
        self.state, effects = step(before, event)
        views = [effect.view for effect in effects if isinstance(effect, PublishView)]
        for effect in effects:
            if isinstance(effect, Fence):
                self.fence(effect.member_id)
        if views or before.view != self.state.view:
            check_step(self.truth(), before, event, self.state, effects)
        for view in views:
            self.last_slot.update((m, slot) for slot, m in enumerate(view.slots) if m)
            self.hash.update(repr((round(self.now_s, 6), view.generation, view.phase, view.slots)).encode())
            self.react(view)
        self.schedule_tick()

    def schedule_tick(self) -> None:
        state = self.state
        times = [state.deadline_s]
        if state.suspected_at_s is not None:
            times.append(state.suspected_at_s + state.limits.suspect_s)
        if state.missing:
            times.append(state.grace_until_s)
        due_s = min((t for t in times if t is not None), default=None)
        if due_s is not None and due_s > self.now_s:
            self.at(due_s, lambda: self.tick(due_s))

    def tick(self, due_s: float) -> None:
        if self.state.deadline_s == due_s:
            late = [m for s, m in enumerate(self.view.slots) if m and not self.state.acked >> s & 1]
            late += [m for i, m in enumerate(self.view.leaving) if not self.state.acked_leaving >> i & 1]
            self.replaceable.update(late)
        self.feed(Tick(now_s=self.now_s))

    # --- Hosts ---

    def new_host(self) -> Member:
        index = len(self.hosts)
        member = Member(
            id=f"m{index}",
            host=f"h{index}",
            address="10.0.0.1",
            control_port=1,
            data_port=2,
            rendezvous_port=3,
            nproc=self.setup.nproc,
        )
        self.hosts[member.id] = _Host(member=member)
        return member

    def join(self) -> None:
        self.feed(MemberJoined(member=self.new_host(), now_s=self.now_s))

    def fence(self, member: MemberId) -> None:
        host = self.hosts[member]
        if host.is_alive:
            self.empty(host)
            host.is_alive = False
            self.unreachable.add(member)
            self.come_back()

    def empty(self, host: _Host) -> None:
        self.lost_since += host.has_state or bool(host.holds)
        host.has_state, host.holds = False, frozenset()

    def come_back(self) -> None:
        if self.setup.return_s is not None:
            self.after(self.setup.return_s, 2 * self.setup.return_s, self.join)

    def lose_any_host(self) -> None:
        alive = [m for m, host in self.hosts.items() if host.is_alive]
        if alive:
            self.lose(self.random.choice(alive))

    def lose(self, member: MemberId) -> None:
        host = self.hosts[member]
        self.empty(host)
        host.is_alive = False
        self.unreachable.add(member)
        self.dead.add(member)
        self.come_back()
        self.after(
            0.1,
            self.setup.limits.lease_ttl_s,
            lambda: self.feed(LeaseExpired(member_id=member, now_s=self.now_s)),
        )

    # --- What agents do when they see a View ---

    def react(self, view: View) -> None:
        match view.phase:
            case Phase.FORMING:
                for host in self.hosts.values():
                    host.has_state, host.holds = False, frozenset()
                self.name, self.protected = Name(step=0, generation=view.generation), None
                self.each(view, view.slots, 1.0, 5.0, self.build)
            case Phase.ABORTING:
                self.abort_began_s = self.now_s if self.abort_began_s is None else self.abort_began_s
                self.each(view, (*view.slots, *view.leaving), 0.05, 0.5, self.ack_abort)
            case Phase.RESTORING:
                self.each(view, view.slots, 0.5, 2.0, self.build)
            case Phase.RUNNING:
                self.resume(view)
        for injection in [i for i in self.injections if i.phase is view.phase]:
            self.inject(injection, view)

    def each(
        self,
        view: View,
        members: tuple[MemberId, ...],
        low_s: float,
        high_s: float,
        action: Callable[[_Host, View], None],
    ) -> None:
        for member in members:
            if member:
                host = self.hosts[member]
                self.after(low_s, high_s, lambda host=host: self.if_current(host, view, action))  # type: ignore[misc]

    def if_current(self, host: _Host, view: View, action: Callable[[_Host, View], None]) -> None:
        is_current = (self.view.generation, self.view.phase) == (view.generation, view.phase)
        if is_current and host.is_alive and host.is_responsive:
            action(host, view)

    def ack_abort(self, host: _Host, view: View) -> None:
        member = host.member.id
        lost: tuple[int, ...] = ()
        if host.is_worker_lost and member in view.slots and member not in view.joining:
            lost = (view.slots.index(member) * view.nproc,)
        self.ack(host, view, inventory=self.inventory(host), lost=lost)

    def build(self, host: _Host, view: View, since_s: float | None = None) -> None:
        """Fetch, rebuild and restore; possible only with all peers."""
        host.is_worker_lost = False
        began_s = self.now_s if since_s is None else since_s
        away = self.slots_away()
        if not away:
            host.has_state = True
            if view.phase is Phase.FORMING:
                host.holds = self.assigned(view, host)
            self.ack(host, view)
        elif self.now_s - began_s < REBUILD_LIMIT_S:
            self.after(1.0, 1.0, lambda: self.if_current(host, view, lambda h, v: self.build(h, v, began_s)))
        else:
            rank = view.slots.index(host.member.id) * view.nproc
            pairs = tuple((rank, slot * view.nproc) for slot in away)
            self.replaceable.update(view.slots[slot] for slot in away)
            self.report(FaultKind.COLLECTIVE, host.member.id, pairs=pairs)

    def slots_away(self) -> list[int]:
        """Slots whose host does not answer."""
        slot_of = self.state.slot_of
        return sorted(slot_of[member] for member in self.unreachable if member in slot_of)

    def assigned(self, view: View, host: _Host) -> frozenset[int]:
        if self.holders_of is not view.holders:
            self.holders_of = view.holders
            self.held_by = {slot: set() for slot in range(len(view.slots))}
            for owner, entry in enumerate(view.holders):
                for slot in entry:
                    self.held_by[slot].add(owner)
        return frozenset(self.held_by[self.state.slot_of[host.member.id]])

    def ack(
        self,
        host: _Host,
        view: View,
        *,
        inventory: Inventory | None = None,
        lost: tuple[int, ...] = (),
    ) -> None:
        ack = Ack(
            member=host.member.id,
            generation=view.generation,
            phase=view.phase,
            inventory=inventory,
            lost_ranks=lost,
            last_step=self.step + 1,
        )
        if lost:
            self.replaceable.add(host.member.id)
        if self.acks and self.acks[0].generation != view.generation:
            self.acks.clear()
        self.acks.append(ack)
        self.feed(Acked(ack=ack, now_s=self.now_s))

    def report(self, kind: FaultKind, member: MemberId, pairs: tuple[tuple[int, int], ...] = ()) -> None:
        view = self.view
        ranks: tuple[int, ...] = ()
        if member in view.slots and kind is not FaultKind.COLLECTIVE:
            ranks = (view.slots.index(member) * view.nproc,)
        fault = Fault(
            kind=kind,
            member=member,
            generation=view.generation,
            ranks=ranks,
            step=self.step + 1,
            pairs=pairs,
            detail=kind.value,
        )
        self.feed(FaultReported(fault=fault, now_s=self.now_s))

    # --- Training ---

    def resume(self, view: View) -> None:
        if self.abort_began_s is not None:
            self.recoveries_s.append(self.now_s - self.abort_began_s)
            self.abort_began_s = None
        assert view.rollback is not None
        self.lost_steps += max(0, self.step - view.rollback.step)
        self.step = view.rollback.step
        self.name = view.rollback
        self.protected, self.lost_since = None, 0
        self.after(1.0, 3.0, lambda: self.if_running(view, self.protect))
        self.at(self.now_s + self.setup.step_s, lambda: self.if_running(view, self.train))

    def if_running(self, view: View, action: Callable[[View], None]) -> None:
        if (self.view.generation, self.view.phase) == (view.generation, Phase.RUNNING):
            action(view)

    def can_train(self, view: View) -> bool:
        return not self.slots_away() and not any(self.hosts[m].is_worker_lost for m in view.slots)

    def protect(self, view: View) -> None:
        if not self.can_train(view):
            return
        for member in view.slots:
            self.hosts[member].holds = self.assigned(view, self.hosts[member])
        self.protected, self.lost_since = self.name, 0

    def train(self, view: View) -> None:
        if self.can_train(view):
            self.step += 1
            if self.protected is not None:
                self.name = self.protected = Name(step=self.step, generation=view.generation)
            if self.step >= self.setup.last_step:
                for member in view.slots:
                    self.feed(Finished(member_id=member, generation=view.generation, now_s=self.now_s))
                return
        self.at(self.now_s + self.setup.step_s, lambda: self.if_running(view, self.train))

    # --- Truth ---

    def inventory(self, host: _Host) -> Inventory:
        member = host.member.id
        nproc = self.setup.nproc
        copies: dict[int, RankCopies] = {}
        slot = self.state.slot_of.get(member, self.last_slot.get(member))
        if host.has_state and slot is not None:
            for rank in range(slot * nproc, (slot + 1) * nproc):
                copies[rank] = RankCopies(rank=rank, own=(self.name,))
        for held in sorted(host.holds):
            for rank in range(held * nproc, (held + 1) * nproc):
                copies[rank] = RankCopies(rank=rank, held=(self.name,))
        return Inventory(member=member, copies=tuple(copies[rank] for rank in sorted(copies)))

    def truth(self) -> Truth:
        inventories = tuple(
            self.inventory(host)
            for host in self.hosts.values()
            if host.is_alive and (host.has_state or host.holds)
        )
        return Truth(
            inventories=inventories,
            dead=frozenset(self.dead),
            replaceable=frozenset(self.replaceable),
            acks=frozenset(self.acks),
            protected=self.protected,
            lost_since=self.lost_since,
        )

    # --- Injections ---

    def inject(self, injection: Injection, view: View) -> None:
        member = self.find(injection.target, view)
        if member is None:
            return
        self.injections.remove(injection)
        self.after(0.0, 0.04, lambda: self.happen(injection.happening, member))

    def find(self, target: Target, view: View) -> MemberId | None:
        spares = [member.id for member in self.state.spares]
        candidates = {
            Target.FIRST_SLOT: view.slots[:1],
            Target.SURVIVOR: view.slots[2:3],
            Target.OTHER: view.slots[4:5],
            Target.JOINING: view.joining,
            Target.LEAVING: view.leaving,
            Target.SPARE: tuple(spares),
        }[target]
        return next((m for m in candidates if m and self.hosts[m].is_alive), None)

    def happen(self, happening: Happening, member: MemberId) -> None:
        host = self.hosts[member]
        if not host.is_alive:
            return
        self.replaceable.add(member)
        match happening:
            case Happening.HOST_LOSS:
                self.lose(member)
            case Happening.HOST_STOP:
                host.is_responsive = False
                self.unreachable.add(member)
                for observer in [m for m in self.hosts if m != member][:2]:
                    self.at(self.now_s + SILENCE_DEAD_S, partial(self.say_silent, observer, member))
            case Happening.AGENT_HANGS:
                host.is_responsive = False
                self.unreachable.add(member)
                if self.view.phase is Phase.RUNNING:  # its workers hang with it, and the others wait
                    self.after(
                        PROGRESS_TIMEOUT_S,
                        PROGRESS_TIMEOUT_S,
                        lambda: self.report(FaultKind.WORKER_STUCK, member),
                    )
            case Happening.WORKER_STUCK:
                host.is_worker_lost = True
                self.after(
                    PROGRESS_TIMEOUT_S,
                    PROGRESS_TIMEOUT_S,
                    lambda: self.report(FaultKind.WORKER_STUCK, member),
                )
            case Happening.LEADER_DIES:
                self.take_over()
            case Happening.COLLECTIVE:
                self.report(FaultKind.COLLECTIVE, member)
            case Happening.WORKER_EXIT | Happening.USER_ERROR | Happening.DEVICE | Happening.SPARE_FAILED:
                host.is_worker_lost = True
                kind = FaultKind[happening.name]
                self.report(kind, member)

    def say_silent(self, observer: MemberId, member: MemberId) -> None:
        self.feed(SilencesHeard(observer=observer, silent=(member,), now_s=self.now_s))

    def take_over(self) -> None:
        """Another agent leads, knowing only what the store says."""
        old = self.state
        members = tuple(m for m in old.members if m.id not in self.dead)
        self.state = initial_state(old.limits, old.n_slots, old.nproc)
        event = LeaderElected(
            view=old.view,
            members=members,
            now_s=self.now_s,
            quarantined=tuple(sorted(old.quarantined)),
            checkpoint=old.checkpoint,
        )
        self.events += 1
        self.state, _ = step(self.state, event)
        self.schedule_tick()
        for ack in [a for a in self.acks if a.generation == self.view.generation]:
            self.feed(Acked(ack=ack, now_s=self.now_s))
