"""Random walks through larger worlds than can be searched exhaustively, with the same oracle.

Blind steps almost never finish a recovery. So some rules are composite: all acks of a phase, a whole
recovery.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import Phase as Stage
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from deadpool.core.types import FaultKind, Phase
from deadpool.testing import commit_search, commit_world, membership_world
from deadpool.testing.oracle import check_stale

SETTINGS = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    phases=(Stage.explicit, Stage.generate),  # the walk is the report: making it shorter takes minutes
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


class MembershipWalk(RuleBasedStateMachine):
    """Jobs of up to five hosts with two ranks each, and faults at any time."""

    @initialize(
        slots=st.integers(1, 5),
        spares=st.integers(0, 3),
        nproc=st.integers(1, 2),
        replicated=st.booleans(),
        checkpoint=st.booleans(),
    )
    def start(self, slots: int, spares: int, nproc: int, replicated: bool, checkpoint: bool) -> None:
        many = 1_000
        self.setup = membership_world.Setup(
            slots=slots,
            spares=spares,
            nproc=nproc,
            kills=many,
            joins=many,
            faults=many,
            fault_kinds=tuple(FaultKind),
            deadlines=many,
            elections=many,
            last_step=many,
            replicated=tuple(range(slots * nproc)) if replicated else (),
            checkpoint=checkpoint,
        )
        self.world = membership_world.initial_world(self.setup)

    @property
    def phase(self) -> Phase:
        assert self.world.state.view is not None
        return self.world.state.view.phase

    def is_over(self) -> bool:
        return self.phase in (Phase.FINISHED, Phase.HALTED)

    def take(self, wanted: str, choice: int) -> bool:
        """Make one of the possible moves whose label contains `wanted`."""
        possible = [(label, world) for label, world in self.possible() if wanted in label]
        if possible:
            _, self.world = possible[choice % len(possible)]
            check_stale(self.world.state)
        return bool(possible)

    def possible(self) -> list[tuple[str, membership_world.World]]:
        return list(membership_world.moves(self.world, self.setup))

    @precondition(lambda self: not self.is_over())
    @rule(choice=st.integers(0, 1_000))
    def anything(self, choice: int) -> None:
        self.take("", choice)

    @precondition(lambda self: not self.is_over())
    @rule(choice=st.integers(0, 20))
    def lose_a_host(self, choice: int) -> None:
        self.take("dies", choice)
        self.take("is noticed", 0)

    @precondition(lambda self: not self.is_over())
    @rule(phases=st.integers(1, 2))
    def finish_phases(self, phases: int) -> None:
        for _ in range(phases):
            phase = self.phase
            while not self.is_over() and self.phase is phase and self.take("acks", 0):
                pass

    @precondition(lambda self: not self.is_over())
    @rule(choice=st.integers(0, 5))
    def recover(self, choice: int) -> None:
        for _ in range(100):
            if self.is_over() or self.phase is Phase.RUNNING:
                break
            self.take("is noticed", 0)
            if not self.is_over() and not self.take("acks", choice) and not self.take("joins", 0):
                break

    @precondition(lambda self: not self.is_over() and self.phase is Phase.RUNNING)
    @rule(steps=st.integers(1, 3))
    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.take("protected again", 0)
            self.take("is committed", 0)

    @precondition(lambda self: self.is_over())
    @rule()
    def start_again(self) -> None:
        self.world = membership_world.initial_world(self.setup)

    @precondition(lambda self: not self.is_over())
    @rule()
    def hear_nothing(self) -> None:
        membership_world.check_bounded(self.world)


class CommitWalk(RuleBasedStateMachine):
    """Three hosts, two leaders, faults and failures, every order of messages."""

    @initialize(hosts=st.integers(2, 3), spurious=st.booleans())
    def start(self, hosts: int, spurious: bool) -> None:
        self.setup = commit_world.Setup(
            hosts=hosts,
            last_step=30,
            faults=3,
            failures=4,
            elections=True,
            spurious=spurious,
            stale=True,
            reduced=False,
        )
        self.world = commit_world.initial_world(self.setup)

    def move(self, choice: int, without: str = "\0") -> None:
        possible = [
            (label, world)
            for label, world in commit_world.moves(self.world, self.setup)
            if without not in label
        ]
        if possible:
            before = self.world
            label, self.world = possible[choice % len(possible)]
            shrink = commit_search.find_shrink(before, self.world, label)
            problem = commit_search.find_violation(self.world) or shrink
            assert not problem, f"{label}: {problem}"

    @rule(choice=st.integers(0, 1_000))
    def anything(self, choice: int) -> None:
        self.move(choice)

    @rule(choices=st.lists(st.integers(0, 1_000), min_size=10, max_size=40))
    def a_while_without_deaths(self, choices: list[int]) -> None:
        for choice in choices:
            self.move(choice, without="dies")


TestMembershipWalk = MembershipWalk.TestCase
TestMembershipWalk.settings = SETTINGS
TestCommitWalk = CommitWalk.TestCase
TestCommitWalk.settings = SETTINGS
