"""Jobs that end early, and go on from the checkpoint they left: no spare, SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deadpool.store.checkpoint import latest_complete

Launch = Callable[..., Any]

RESTORE_S = 3.0  # less than the grace


def check_goes_on(rig: Any, launch: Launch, args: tuple[str, ...], folder: Path, nnodes: int = 2) -> None:
    """A second run begins from the checkpoint, and ends as if nothing had ever happened."""
    manifests = folder.glob("*/manifest.json")
    step = max(int(path.parent.name.removeprefix("step-").split(".")[0]) for path in manifests)
    job = launch(args, nnodes=nnodes, spares=0, options=("--checkpoint-dir", str(folder)))
    assert job.wait() == 0, job.output[-4000:]
    assert min(int(record["s"]) for record in job.records(0)) == step + 1
    undisturbed = rig.undisturbed(args, nnodes)
    for rank in range(nnodes):
        assert job.digests(rank)["final"] == undisturbed.digests(rank)["final"]
        assert job.digests(rank)["blob"] == undisturbed.digests(rank)["blob"]


@pytest.mark.full
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_without_a_spare_the_lost_host_is_in_the_checkpoint_too(
    rig: Any, launch: Launch, tmp_path: Path, parallel: str
) -> None:
    args = ("--parallel", parallel, "--steps", "14")
    folder = tmp_path / "checkpoints"
    job = launch(
        args,
        nnodes=2,
        spares=0,
        options=(
            "--spare-wait-s",
            "4",
            "--checkpoint-dir",
            str(folder),
            "--inject",
            "host-loss:rank=1@step=8",
        ),
    )
    assert job.wait() == 3, job.output[-4000:]
    assert "No spare came within 4 s (spare_wait_s) for rank 1." in job.output
    assert job.named("checkpoint.complete")
    check_goes_on(rig, launch, args, folder)


@pytest.mark.full
def test_sigterm_leaves_the_newest_snapshot_behind(rig: Any, launch: Launch, tmp_path: Path) -> None:
    args = ("--steps", "60")
    folder = tmp_path / "checkpoints"
    job = launch(args, nnodes=2, spares=1, options=("--checkpoint-dir", str(folder)))
    job.wait_for(lambda event: event["event"] == "snapshot.committed" and event["step"] >= 5, "commit")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143, job.output[-4000:]
    check_goes_on(rig, launch, args, folder)


def test_sigterm_is_in_the_report_and_stays_the_exit_code_where_the_events_cannot_be_written(
    launch: Launch, tmp_path: Path
) -> None:
    report, no_folder = tmp_path / "report.json", tmp_path / "file"
    no_folder.touch()
    options = ("--report", str(report), "--events", str(no_folder / "events.jsonl"))
    job = launch(("--steps", "600"), nnodes=2, spares=0, options=options)
    job.wait_for(lambda event: event["event"] == "snapshot.committed", "commit")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143, job.output[-4000:]
    assert "the events of this run could not be written" in job.output
    told = json.loads(report.read_text())
    assert (told["exit_code"], told["reason"]) == (143, "SIGTERM")
    assert told["bytes_sent"] > 0
    assert len(told["host_memory_bytes"]) == 2


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_sigterm_just_after_a_host_is_lost_saves_its_ranks_too(
    rig: Any, launch: Launch, tmp_path: Path, how: signal.Signals
) -> None:
    """As of a scheduler that ends the job because of the lost host: nobody has noticed the loss yet."""
    args, folder = ("--steps", "60"), tmp_path / "checkpoints"
    job = launch(args, nnodes=3, options=("--checkpoint-dir", str(folder)))
    job.wait_for(lambda event: event["event"] == "snapshot.committed" and event["step"] >= 5, "commit")
    victim = job.agent_of(1)
    os.kill(victim, how)
    safe = max(event["step"] for event in job.named("snapshot.committed"))
    job.process.send_signal(signal.SIGTERM)
    job.wait_until(lambda: job.named("checkpoint.complete"), "a complete checkpoint")
    if how is signal.SIGSTOP:
        os.kill(victim, signal.SIGKILL)
    assert job.wait() == 143, job.output[-4000:]
    saved = latest_complete(folder)
    assert saved is not None
    assert saved.name.step >= safe
    check_goes_on(rig, launch, args, folder, nnodes=3)


@pytest.mark.full
def test_sigterm_in_the_middle_of_a_recovery_saves_what_it_goes_back_to(
    rig: Any, launch: Launch, tmp_path: Path
) -> None:
    args = ("--steps", "60", "--holds", str(tmp_path))
    folder, hold = tmp_path / "checkpoints", tmp_path / "rank-1"
    options = ("--checkpoint-dir", str(folder), "--no-rehearse", "--inject", "host-loss:rank=1@step=8")
    job = launch(args, nnodes=2, spares=1, options=options)
    job.wait_for(lambda event: event["event"] == "snapshot.committed", "commit")
    hold.touch()  # the spare builds until it is gone
    job.wait_for(lambda event: event["event"] == "view.adopted" and event["phase"] == "restoring", "restore")
    job.process.send_signal(signal.SIGTERM)
    time.sleep(RESTORE_S)
    hold.unlink()
    assert job.wait() == 143, job.output[-4000:]
    check_goes_on(rig, launch, args, folder)
