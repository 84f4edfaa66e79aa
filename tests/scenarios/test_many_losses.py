"""Scenarios A10, A11, A12 and A14 of the catalogue: more than one loss, and more spares than slots."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deadpool.events import boottime_s
from deadpool.membership.embedded import EmbeddedEtcd

Launch = Callable[..., Any]
ByHand = Callable[..., Any]

RECOVER_S = 15.0


@pytest.mark.full
def test_two_hosts_lost_at_once_are_replaced_together(rig: Any, launch: Launch) -> None:
    """A10: neither holds the copies of the other."""
    args = ("--parallel", "fsdp2")
    job = launch(
        args,
        spares=2,
        options=("--inject", "host-loss:rank=0@step=9", "--inject", "host-loss:rank=2@step=9"),
    )
    assert job.wait() == 0, job.output[-4000:]
    first, last = (injection["monotonic_s"] for injection in job.injections())
    assert last - first < 1.0
    rig.check_trace(job, args)
    rig.check_one_owner(job)
    rig.check_survivors(job, replaced={0, 2})
    rig.check_recovery(job, last)
    views = job.named("view.published")
    assert max(view["generation"] for view in views) <= 3
    struck = {worker["member"] for worker in job.workers() if worker["rank"] in (0, 2)}
    assert len(struck) == 4, "two before, two after"
    assert job.named("recovery.done")[-1]["source"] == "replica"


@pytest.mark.full
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_an_owner_lost_with_its_holder_costs_the_steps_since_the_checkpoint(
    rig: Any, launch: Launch, tmp_path: Path, parallel: str
) -> None:
    """A11: the copies of rank 1 are in the memory of no host any more."""
    args = ("--parallel", parallel, "--steps", "30")
    job = launch(
        args,
        nnodes=3,
        spares=2,
        options=(
            *("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "5"),
            *("--inject", "host-loss:rank=1@step=18", "--inject", "host-loss:rank=2@step=18"),
        ),
    )
    assert job.wait() == 0, job.output[-4000:]
    rig.check_trace(job, args, world_size=3)
    rig.check_one_owner(job, world_size=3)
    rig.check_survivors(job, replaced={1, 2}, world_size=3)
    done = job.named("recovery.done")[-1]
    durable = [
        event["step"]
        for event in job.named("checkpoint.complete")
        if event["monotonic_s"] < done["monotonic_s"]
    ]
    assert done["source"] == "checkpoint"
    assert done["rollback_step"] == max(durable)
    for rank in range(3):
        again = [record["s"] for record in job.records(rank) if record["g"] == done["generation"]]
        assert min(again) == max(durable) + 1
    assert f"back to step {max(durable)} (checkpoint)" in job.output


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("phase", ["aborting", "restoring"])
def test_a_host_lost_while_another_is_replaced_is_replaced_too(
    rig: Any, launch: Launch, phase: str, how: signal.Signals
) -> None:
    """A12: the second falls when the new generation is announced, and not ready yet."""
    args = ("--parallel", "fsdp2", "--steps", "24")
    job = launch(args, spares=2, options=("--inject", "host-loss:rank=2@step=9"))
    second = job.wait_until(lambda: job.named("snapshot.committed") and host_of(job, 0), "host of rank 0")
    job.wait_for(
        lambda event: (
            event["event"] == "view.published" and event["generation"] == 2 and event["phase"] == phase
        ),
        f"generation 2 {phase}",
    )
    struck_s = boottime_s()
    for pid in second:
        os.kill(pid, how)
    assert job.wait() == 0, job.output[-4000:]
    rig.check_trace(job, args)
    rig.check_one_owner(job)
    rig.check_survivors(job, replaced={0, 2})
    rig.check_recovery(job, struck_s, within_s=2 * RECOVER_S)


def host_of(job: Any, rank: int) -> list[int]:
    """Agent and worker."""
    return [job.agent_of(rank), job.worker_of(rank)]


@pytest.mark.full
def test_hosts_beyond_the_slots_stay_spares(
    rig: Any, by_hand: ByHand, etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    """A14: two spares wait, and one host more comes in the middle of a rebuild."""
    args = ("--steps", "40", "--holds", str(tmp_path))
    job = by_hand((etcd.endpoint,), args, nnodes=3, spares=2)
    for _ in range(5):
        job.start_host()
    job.wait_for(lambda event: event["event"] == "snapshot.committed" and event["step"] >= 5, "commit")
    hold = tmp_path / "rank-1"
    hold.touch()
    victim = job.agent_of(1)
    os.kill(victim, signal.SIGKILL)
    job.wait_for(
        lambda event: event["event"] == "view.published" and event["phase"] == "restoring", "rebuild"
    )
    late = job.start_host()
    job.wait_until(lambda: len(job.named("member.registered")) == 6, "registration of the late host")
    assert not job.named("recovery.done")
    hold.unlink()
    codes = job.wait()
    assert codes.pop(victim) == -signal.SIGKILL
    assert set(codes.values()) == {0}, job.output[-4000:]
    assert late.pid in codes
    for view in job.named("view.published"):
        if view["phase"] != "forming":
            assert len(view["slots"]) == 3
    assert len(job.named("recovery.done")) == 1
    last = job.named("view.published")[-1]["slots"]
    finished = {job.digests(rank)["member"] for rank in range(3)}
    assert set(last) == finished
    waiting = {event["member"] for event in job.named("member.registered")} - finished
    assert len(waiting) == 3, "the lost host and two spares"
    rig.check_trace(job, args, world_size=3)
    rig.check_survivors(job, replaced={1}, world_size=3)
