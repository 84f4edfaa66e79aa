"""How an agent comes to its end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from deadpool.config import Config
from deadpool.core.types import Name, Phase
from deadpool.events import EventLog
from deadpool.membership.lease import LeaseKeeper
from deadpool.membership.memory import MemoryServer, MemoryStore
from deadpool.runtime import ending as ending_module
from deadpool.runtime.checkpointing import CheckpointCallbacks, CheckpointTier
from deadpool.runtime.ending import AgentEnd, Ending, EndingCallbacks
from deadpool.runtime.workforce import Workforce, WorkforceCallbacks
from deadpool.store.checkpoint import Shard, complete_manifests
from deadpool.store.host_memory import HostMemoryStore
from tests.unit.runtime.support import LAYOUT, WAIT_S, Loop, fill, make_view

BACK_TO = Name(step=6, generation=1)
KNOWN: dict[str, Any] = {"protected": None, "begun": None, "ranks": range(1), "summarise": None}


class Checkpoints:
    """The checkpoint tier of a host with the job's only rank, which has BACK_TO in its bank.

    It is on slow storage: nothing is durable before `run_until_durable`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._loop = Loop()
        self._store = HostMemoryStore("h0")
        segment = self._store.create_own(0, LAYOUT)
        segment.write_once(b"once")
        fill(segment, 0, BACK_TO)
        self.tier = CheckpointTier(
            root,
            self._store,
            1,
            EventLog(None, "run", "h0"),
            post=self._loop.post,
            callbacks=CheckpointCallbacks(
                written=self._on_written, completed=lambda name: None, may_write=lambda: True
            ),
        )

    def run_until_durable(self) -> None:
        self._loop.run_until(lambda: self.tier.is_durable(BACK_TO), f"a checkpoint of {BACK_TO}")

    def close(self) -> None:
        self.tier.close()
        self._store.close()

    def _on_written(self, name: Name, shard: Shard) -> None:
        """This host leads, too."""
        self.tier.shard_written(name, shard)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    made = Checkpoints(tmp_path / "checkpoints")
    yield made
    made.close()


def never(*_: object) -> Any:
    raise AssertionError("a host that has not joined the job has nothing to ask for")


def make_ending(folder: Path, **known: Any) -> tuple[Ending, Workforce]:
    workforce = Workforce(
        Config(),
        folder,
        never,
        WorkforceCallbacks(message=never, parked=never, lost=never, unreaped=never, ended=never),
    )
    names = ("pid_of", "protected", "ranks", "begun", "job_view", "summarise", "needs_view", "unheard")
    asked = dict.fromkeys(names, never)
    answers = {name: value if callable(value) else lambda value=value: value for name, value in known.items()}
    callbacks = EndingCallbacks(**{**asked, **answers})
    return Ending(folder, workforce, EventLog(None, "run", "h0"), callbacks, grace_s=30.0), workforce


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_host_at_once_that_has_not_joined_the_job(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    ending, workforce = make_ending(tmp_path)
    try:
        ending.check_signal(None)
        ending.signal = number
        with pytest.raises(AgentEnd) as end:
            ending.check_signal(None)
    finally:
        workforce.stop_all(WAIT_S)
    assert end.value.code == code


@pytest.mark.parametrize("how", ["SIGTERM", "Ctrl-C", "it failed"])
def test_a_host_that_leaves_before_the_job_has_ended_sums_up_what_it_did(
    tmp_path: Path, checkpoints: Checkpoints, how: str
) -> None:
    sums: list[str] = []
    known = {**KNOWN, "summarise": lambda: sums.append(how)}
    view = make_view(("a", "b"), generation=1, phase=Phase.FORMING)  # nothing to save
    ending, workforce = make_ending(tmp_path, **known, job_view=view)
    ending.signal = {"SIGTERM": signal.SIGTERM, "Ctrl-C": signal.SIGINT}.get(how, 0)
    with pytest.raises(AgentEnd, match=how):
        ending.check_signal(checkpoints.tier)
        ending.give_up("it failed")
    workforce.stop_all(WAIT_S)
    assert sums == [how]


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.STALLED])
def test_sigterm_after_a_recovery_saves_what_it_went_back_to_although_no_holder_has_it_yet(
    tmp_path: Path, checkpoints: Checkpoints, phase: Phase
) -> None:
    view = make_view(("a", "b"), generation=2, phase=phase, rollback=BACK_TO)
    ending, workforce = make_ending(tmp_path, **KNOWN, job_view=view, unheard=frozenset())
    ending.signal = signal.SIGTERM
    try:
        ending.check_signal(checkpoints.tier)
        ending.check_signal(checkpoints.tier)  # not before it is durable
        checkpoints.run_until_durable()
        with pytest.raises(AgentEnd) as end:
            ending.check_signal(checkpoints.tier)
    finally:
        workforce.stop_all(WAIT_S)
    assert end.value.code == 143
    assert [manifest.name for manifest in complete_manifests(checkpoints.root)] == [BACK_TO]


@pytest.mark.parametrize(
    ("phase", "ends"),
    [
        (Phase.ABORTING, False),  # until it is known what the recovery goes back to
        (Phase.RESTORING, False),
        (Phase.FORMING, True),
    ],
)
def test_sigterm_saves_nothing_where_no_step_is_known_that_every_owner_has(
    tmp_path: Path, checkpoints: Checkpoints, phase: Phase, ends: bool
) -> None:
    view = make_view(
        ("a", "b"), generation=2, phase=phase, rollback=BACK_TO if phase is not Phase.FORMING else None
    )
    ending, workforce = make_ending(tmp_path, **KNOWN, job_view=view, unheard=frozenset())
    ending.signal = signal.SIGTERM
    try:
        with pytest.raises(AgentEnd) if ends else nullcontext():
            ending.check_signal(checkpoints.tier)
    finally:
        workforce.stop_all(WAIT_S)
    checkpoints.tier.close()  # what was begun is written
    assert not checkpoints.root.exists()


def test_only_the_end_of_the_job_or_a_signal_to_a_formed_one_lets_its_records_be_erased(
    tmp_path: Path,
) -> None:
    for view, number, is_of_job in (
        (None, signal.SIGTERM, False),  # others still load
        (make_view(("a", "b")), 0, False),  # this host was replaced
        (make_view(("a", "b")), signal.SIGTERM, True),
    ):
        ending, workforce = make_ending(tmp_path, job_view=view)
        ending.signal = number
        assert ending.is_of_job() is is_of_job
        workforce.stop_all(WAIT_S)


@pytest.mark.parametrize(
    ("is_leaving", "is_heard", "peer_reaches", "may"),
    [
        (True, True, True, False),  # it may have been replaced
        (True, False, False, False),  # it is cut off, or has just woken
        (True, True, False, True),  # etcd is away for all, and nobody can be replaced
        (False, True, False, False),  # its job may have been started anew elsewhere
    ],
)
def test_a_host_whose_lease_has_run_out_writes_only_when_it_leaves_and_no_peer_reaches_etcd(
    tmp_path: Path, checkpoints: Checkpoints, is_leaving: bool, is_heard: bool, peer_reaches: bool, may: bool
) -> None:
    def keeper() -> LeaseKeeper:
        return LeaseKeeper(
            MemoryStore(MemoryServer()), 30.0, enrol=lambda lease, again: None, on_lost=lambda error: None
        )

    view = make_view(("a", "b"), generation=2, rollback=BACK_TO)
    ending, workforce = make_ending(tmp_path, **KNOWN, job_view=view, unheard=frozenset())
    if is_leaving:
        ending.signal = signal.SIGTERM
        ending.check_signal(checkpoints.tier)
    assert ending.may_write(keeper(), (is_heard, peer_reaches)) is may  # it never had a lease
    renewed = keeper()
    renewed.start()
    assert ending.may_write(renewed, (is_heard, peer_reaches))
    renewed.close()
    assert not ending.may_write(None, (is_heard, peer_reaches))
    workforce.stop_all(WAIT_S)


def test_a_job_that_waits_for_etcd_for_too_long_ends_with_code_5_and_saves_what_is_in_memory(
    tmp_path: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending_module, "STORE_LIMIT_S", 0.0)
    view = make_view(("a", "b"), generation=2, phase=Phase.RUNNING, rollback=BACK_TO)
    ending, workforce = make_ending(tmp_path, **KNOWN, job_view=view, unheard=frozenset(), needs_view=True)
    try:
        for _ in range(2):
            ending.check_store(view, None)
            ending.check_signal(checkpoints.tier)  # not before it is durable
        checkpoints.run_until_durable()
        with pytest.raises(AgentEnd, match="no control plane") as end:
            ending.check_signal(checkpoints.tier)
    finally:
        workforce.stop_all(WAIT_S)
    assert end.value.code == 5
    assert [manifest.name for manifest in complete_manifests(checkpoints.root)] == [BACK_TO]


def test_a_checkpoint_is_completed_by_the_leader_or_when_it_is_gone_by_the_first_host_that_lives(
    tmp_path: Path, checkpoints: Checkpoints
) -> None:
    view = make_view(("a", "b", "c"), generation=2, rollback=BACK_TO)
    ending, workforce = make_ending(tmp_path, **KNOWN, job_view=view, unheard=frozenset({"a", "lead"}))
    assert ending.completer("lead") == "lead"  # a job that goes on elects another
    ending.signal = signal.SIGTERM
    ending.check_signal(checkpoints.tier)
    assert ending.completer("lead") == "b"
    assert ending.completer("") == "b"
    assert ending.completer("c") == "c"
    workforce.stop_all(WAIT_S)


@pytest.mark.parametrize("has_lease", [True, False])
def test_older_checkpoints_are_deleted_by_a_host_that_leaves_only_if_it_has_a_lease(
    tmp_path: Path, checkpoints: Checkpoints, has_lease: bool
) -> None:
    older = checkpoints.root / "step-1.g1"
    older.mkdir(parents=True)
    keeper = LeaseKeeper(
        MemoryStore(MemoryServer()), 30.0, enrol=lambda lease, again: None, on_lost=lambda error: None
    )
    if has_lease:
        keeper.start()
    view = make_view(("a", "b"), generation=2, rollback=BACK_TO)
    ending, workforce = make_ending(tmp_path, **KNOWN, job_view=view, unheard=frozenset(), needs_view=False)
    ending.signal = signal.SIGTERM
    ending.check_store(view, keeper if has_lease else None)
    ending.check_signal(checkpoints.tier)
    checkpoints.run_until_durable()
    checkpoints.tier.close()
    assert older.exists() is not has_lease
    if has_lease:
        keeper.close()
    workforce.stop_all(WAIT_S)
