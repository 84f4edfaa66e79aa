"""`deadpool verify` on real input, and that it can say no."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verifying import NO, check_verified, verify


@pytest.mark.timeout(180)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_gpt_on_real_text_survives_a_killed_and_a_stopped_worker(parallel: str, tmp_path: Path) -> None:
    check_verified(
        "--nnodes",
        "2",
        "--spares",
        "2",
        "--run-dir",
        str(tmp_path),
        "--inject",
        "sigkill:rank=1@step=5",
        "--inject",
        "sigstop:rank=0@step=9",
        "examples/train_gpt.py",
        "--parallel",
        parallel,
        "--steps",
        "14",
    )


@pytest.mark.timeout(120)
@pytest.mark.full
def test_one_flipped_bit_after_a_recovery_makes_verify_say_no(tmp_path: Path) -> None:
    code, lines = verify(
        "--nnodes",
        "2",
        "--spares",
        "1",
        "--run-dir",
        str(tmp_path),
        "--inject",
        "sigkill:rank=1@step=5",
        "--inject",
        "bitflip:rank=0@step=9",
        "tests/scenarios/toy.py",
        "--steps",
        "14",
    )
    assert lines[-1].startswith(NO), "\n".join(lines[-40:])
    assert code == 1


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
@pytest.mark.parametrize("kinds", [("sigkill", "sigstop"), ("host-loss", "host-stop")])
def test_three_hosts_survive_two_faults_in_one_run(
    parallel: str, kinds: tuple[str, str], tmp_path: Path
) -> None:
    check_verified(
        "--nnodes",
        "3",
        "--spares",
        "2",
        "--run-dir",
        str(tmp_path),
        "--inject",
        f"{kinds[0]}:rank=1@step=7",
        "--inject",
        f"{kinds[1]}:rank=0@step=15",
        "examples/train_gpt.py",
        "--parallel",
        parallel,
        limit_s=280.0,
    )


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_host_with_two_workers_is_lost(parallel: str, tmp_path: Path) -> None:
    check_verified(
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--spares",
        "1",
        "--run-dir",
        str(tmp_path),
        "--inject",
        "host-loss:rank=1@step=7",
        "examples/train_gpt.py",
        "--parallel",
        parallel,
        limit_s=280.0,
    )
