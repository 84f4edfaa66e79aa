from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deadpool.cli.compare import compare_runs
from deadpool.cli.options import read_run_config
from deadpool.cli.verify import (
    Outcome,
    disturbed_arguments,
    judge_runs,
    undisturbed_arguments,
    verify_command,
)
from deadpool.config import Config, JobConfig, RunConfig
from deadpool.errors import ConfigError
from deadpool.testing.faults import parse_injections

SPEC = "sigkill:rank=1@step=4"
YES = "bit-identical to the undisturbed run: yes"
NO = "bit-identical to the undisturbed run: no: "

MakeRun = Callable[..., Path]


@pytest.fixture
def runs(tmp_path: Path, make_run: MakeRun) -> tuple[Path, Path]:
    return make_run(tmp_path / "before"), make_run(tmp_path / "after", disturbed=True)


def judge(runs: tuple[Path, Path], *specs: str, nproc: int = 1) -> Outcome:
    config = replace(Config(), job=JobConfig(nnodes=2 // nproc, nproc_per_node=nproc))
    return judge_runs(*runs, config, parse_injections(specs or (SPEC,)))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_line(path: Path, number: int, change: Callable[[dict[str, Any]], object]) -> None:
    lines = path.read_text().splitlines()
    value = json.loads(lines[number])
    change(value)
    lines[number] = json.dumps(value)
    path.write_text("\n".join(lines) + "\n")


def drop_events(run_dir: Path, name: str) -> None:
    for path in run_dir.glob("events-*.jsonl"):
        path.write_text(
            "".join(line + "\n" for line in path.read_text().splitlines() if f'"{name}"' not in line)
        )


def found(outcome: Outcome) -> tuple[int, int, str]:
    assert outcome.difference is not None
    return outcome.difference.rank, outcome.difference.step, outcome.difference.what


def test_a_recovered_run_with_equal_bits_is_identical(runs: tuple[Path, Path]) -> None:
    assert judge(runs) == Outcome(exit_code=0, difference=None)


def test_one_bit_of_one_record_is_a_difference_and_is_named(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    edit_line(runs[1] / "records/rank-1.jsonl", 4, lambda line: line.update(b="01050001"))
    outcome = judge(runs)
    assert (outcome.exit_code, found(outcome)) == (1, (1, 5, "record 'loss': 1 of 32 bits differ"))
    assert "rank 1, step 5, record 'loss': 1 of 32 bits differ" in capsys.readouterr().out


def test_the_earliest_difference_is_the_one_reported(runs: tuple[Path, Path]) -> None:
    edit_line(runs[1] / "records/rank-0.jsonl", 5, lambda line: line.update(b="ff"))
    edit_line(runs[1] / "records/rank-1.jsonl", 1, lambda line: line.update(d="float64"))
    assert found(judge(runs)) == (1, 2, "record 'loss': dtype float64 instead of float32")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"n": "other"}, "recorded 'other' where 'loss' was recorded"),
        ({"sh": [1]}, "record 'loss': shape [1] instead of []"),
        ({"b": "01"}, "record 'loss': 1 bytes instead of 4"),
        ({"b": "zz"}, "record 'loss': bytes that are no hexadecimal number"),
    ],
)
def test_every_part_of_a_record_counts(runs: tuple[Path, Path], change: dict[str, Any], what: str) -> None:
    edit_line(runs[1] / "records/rank-0.jsonl", 2, lambda line: line.update(change))
    assert found(judge(runs)) == (0, 3, what)


def test_a_missing_record_and_one_too_many_are_differences(runs: tuple[Path, Path]) -> None:
    path = runs[1] / "records/rank-0.jsonl"
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    assert found(judge(runs)) == (0, 6, "0 recorded values instead of 1")
    path.write_text(whole + whole.splitlines()[-1] + "\n")
    assert found(judge(runs)) == (0, 6, "2 recorded values instead of 1")


def test_a_step_that_ran_again_counts_as_it_ran_last(runs: tuple[Path, Path]) -> None:
    """On a GPU the aborted attempt may have recorded what a dead collective left behind."""
    path = runs[1] / "records/rank-0.jsonl"
    garbage = {"g": 1, "s": 4, "n": "loss", "d": "float32", "sh": [], "b": "deadbeef"}
    path.write_text(path.read_text() + json.dumps(garbage) + "\n")
    assert judge(runs).exit_code == 0


def test_half_a_line_of_a_killed_writer_hides_nothing_that_follows(runs: tuple[Path, Path]) -> None:
    path = runs[1] / "records/rank-1.jsonl"
    lines = path.read_text().splitlines()
    lines[3] = '{"g": 1, "s": 4, "n": "lo' + lines[3].replace('{"g": 2', '{"g":2')
    path.write_text("\n".join(lines) + "\n")
    assert judge(runs).exit_code == 0


@pytest.mark.parametrize(
    ("key", "name", "what"),
    [
        ("final", "weight", "tensor 'weight' of the final state differs"),
        ("blob", "rng.torch", "blob 'rng.torch' of the final state differs"),
    ],
)
def test_a_changed_tensor_or_blob_part_is_a_difference(
    runs: tuple[Path, Path], key: str, name: str, what: str
) -> None:
    edit(runs[1] / "digests/rank-1.json", lambda digests: digests[key].update({name: "ff"}))
    outcome = judge(runs)
    assert (outcome.exit_code, found(outcome)) == (1, (1, 6, what))


def test_a_missing_and_a_new_tensor_are_differences(runs: tuple[Path, Path]) -> None:
    edit(runs[1] / "digests/rank-0.json", lambda digests: digests["final"].pop("bias"))
    assert found(judge(runs)) == (0, 6, "tensor 'bias' of the final state is missing")
    edit(runs[1] / "digests/rank-0.json", lambda digests: digests["final"].update(bias="b0", more="c0"))
    assert found(judge(runs)) == (0, 6, "tensor 'more' of the final state is new")


def test_a_rank_without_final_state_is_a_difference(runs: tuple[Path, Path]) -> None:
    (runs[1] / "digests/rank-1.json").unlink()
    outcome = judge(runs)
    assert (outcome.exit_code, found(outcome)) == (
        1,
        (1, 0, "no final state of this rank in the disturbed run"),
    )


def test_a_run_that_ended_early_is_a_difference(runs: tuple[Path, Path]) -> None:
    edit(runs[1] / "digests/rank-0.json", lambda digests: digests.update(steps=5))
    assert found(judge(runs)) == (0, 5, "the run ended at step 5 instead of 6")


def test_an_injection_that_did_not_fire_proves_nothing(runs: tuple[Path, Path]) -> None:
    outcome = judge(runs, SPEC, "sigstop:rank=0@step=5")
    assert (outcome.exit_code, found(outcome)) == (4, (0, 5, "sigstop:rank=0@step=5 did not fire"))


def test_an_injection_without_a_recovery_proves_nothing(runs: tuple[Path, Path]) -> None:
    drop_events(runs[1], "recovery.done")
    outcome = judge(runs)
    assert (outcome.exit_code, found(outcome)) == (4, (1, 4, f"no recovery followed {SPEC}"))


def test_a_recovery_before_the_injection_is_not_its_recovery(runs: tuple[Path, Path]) -> None:
    edit(runs[1] / "injections/0.json", lambda record: record.update(monotonic_s=8.0))
    assert found(judge(runs))[2] == f"no recovery followed {SPEC}"


def test_a_victim_that_ran_on_proves_nothing(runs: tuple[Path, Path]) -> None:
    edit(runs[1] / "injections/0.json", lambda record: record.update(pid=200))
    outcome = judge(runs)
    assert (outcome.exit_code, found(outcome)) == (4, (1, 4, f"process 200 was struck by {SPEC} and ran on"))


def test_a_survivor_with_another_process_proves_nothing(runs: tuple[Path, Path]) -> None:
    edit(runs[1] / "digests/rank-0.json", lambda digests: digests.update(pid=300))
    outcome = judge(runs)
    assert (outcome.exit_code, found(outcome)) == (4, (0, 0, "a survivor's process changed: pids 100, 300"))


def test_siblings_of_the_victim_may_be_replaced_with_it(runs: tuple[Path, Path]) -> None:
    edit(runs[1] / "digests/rank-0.json", lambda digests: digests.update(pid=300))
    assert judge(runs, nproc=2).exit_code == 0


def test_a_run_that_committed_nothing_proves_nothing(runs: tuple[Path, Path]) -> None:
    drop_events(runs[1], "snapshot.committed")
    outcome = judge(runs)
    assert (outcome.exit_code, found(outcome)) == (4, (0, 0, "no step was committed"))


def test_training_that_changed_nothing_proves_nothing(runs: tuple[Path, Path]) -> None:
    for run_dir in runs:
        for rank in range(2):
            path = run_dir / f"digests/rank-{rank}.json"
            edit(path, lambda digests: digests.update(final=digests["initial"]))
    outcome = judge(runs)
    assert (outcome.exit_code, found(outcome)) == (4, (0, 6, "the final state equals the initial one"))


def test_an_undisturbed_run_with_a_recovery_is_no_measure(runs: tuple[Path, Path]) -> None:
    with open(runs[0] / "events-h0-a.jsonl", "a") as file:
        file.write(
            '{"event": "recovery.begin", "generation": 2, "reason": "slow", "monotonic_s": 1, "wall_s": 1}\n'
        )
    outcome = judge(runs)
    assert outcome.exit_code == 4
    assert found(outcome)[2] == "the undisturbed run had a recovery itself: slow"


def test_a_bit_flip_alone_needs_no_recovery_and_so_proves_nothing(runs: tuple[Path, Path]) -> None:
    edit(runs[1] / "injections/0.json", lambda record: record.update(kind="bitflip"))
    outcome = judge(runs, "bitflip:rank=1@step=4")
    assert (outcome.exit_code, found(outcome)[2]) == (4, "no injection needs a recovery")


def test_without_records_the_state_is_compared_and_that_is_said(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for run_dir in runs:
        for path in (run_dir / "records").iterdir():
            path.unlink()
    assert judge(runs).exit_code == 0
    assert "only the final state is compared" in capsys.readouterr().out
    assert not compare_runs(*runs, 2).has_records


# ---- the command -------------------------------------------------------------------------------------


def config_for(tmp_path: Path, *specs: str, **more: object) -> Config:
    script = tmp_path / "train.py"
    if not script.exists():
        script.write_text("print('training')\n")
    values: dict[str, object] = {
        "run__standalone": True,
        "job__nnodes": 2,
        "job__spares": 1,
        "run__run_dir": str(tmp_path / "runs"),
        "run__inject": list(specs),
        "run__script": str(script),
        "run__script_args": ["--steps", "6"],
        **more,
    }
    return read_run_config(values, {})


def option(arguments: Sequence[str], flag: str) -> str:
    return arguments[list(arguments).index(flag) + 1]


class Runs:
    """Stands for the process that `deadpool run` is: makes a folder as the real one would, or fails."""

    def __init__(self, make_run: MakeRun, codes: Sequence[int] = (0, 0)) -> None:
        self._make_run = make_run
        self._codes = list(codes)
        self.commands: list[list[str]] = []

    def __call__(self, arguments: Sequence[str]) -> int:
        self.commands.append(list(arguments))
        code = self._codes.pop(0)
        if code == 0:
            self._make_run(Path(option(arguments, "--run-dir")), disturbed="--inject" in arguments)
        return code


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_the_last_line_says_yes(
    tmp_path: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(make_run)
    assert verify_command(config_for(tmp_path, SPEC), run=runs) == 0
    assert last_line(capsys) == YES
    undisturbed, disturbed = runs.commands
    assert "--inject" not in undisturbed
    assert option(disturbed, "--inject") == SPEC
    for command, name in ((undisturbed, "undisturbed"), (disturbed, "disturbed")):
        folder = str(tmp_path / "runs" / name)
        assert option(command, "--run-dir") == folder
        assert option(command, "--record-dir") == f"{folder}/records"
        assert command[-3:] == [str(tmp_path / "train.py"), "--steps", "6"]
        assert option(command, "--nnodes") == "2"
        assert "--standalone" in command


def test_the_last_line_says_no_with_rank_step_and_what(
    tmp_path: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    def make_and_spoil(folder: Path, *, disturbed: bool) -> Path:
        make_run(folder, disturbed=disturbed)
        if disturbed:
            edit(folder / "digests/rank-1.json", lambda digests: digests["final"].update(weight="ff"))
        return folder

    assert verify_command(config_for(tmp_path, SPEC), run=Runs(make_and_spoil)) == 1
    assert last_line(capsys) == f"{NO}rank 1, step 6, tensor 'weight' of the final state differs"


def test_without_an_injection_nothing_is_run_and_the_answer_is_no(
    tmp_path: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(make_run)
    assert verify_command(config_for(tmp_path), run=runs) == 4
    assert last_line(capsys) == f"{NO}rank 0, step 0, no --inject was given, so no recovery can happen"
    assert runs.commands == []


def test_a_failed_undisturbed_run_is_passed_on(
    tmp_path: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(make_run, [1])
    assert verify_command(config_for(tmp_path, SPEC), run=runs) == 1
    assert "the undisturbed run ended with code 1" in capsys.readouterr().out
    assert len(runs.commands) == 1


@pytest.mark.parametrize(("code", "expected"), [(3, 4), (1, 4), (137, 4), (5, 5), (130, 130), (143, 143)])
def test_a_failed_disturbed_run_is_never_a_yes(
    tmp_path: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str], code: int, expected: int
) -> None:
    assert verify_command(config_for(tmp_path, SPEC), run=Runs(make_run, [0, code])) == expected
    output = capsys.readouterr().out
    assert f"the disturbed run ended with code {code}" in output
    assert YES not in output


def test_an_undisturbed_run_is_kept_and_used_again_for_the_same_command_only(
    tmp_path: Path, make_run: MakeRun
) -> None:
    kept = str(tmp_path / "kept")
    first = Runs(make_run)
    assert verify_command(config_for(tmp_path, SPEC), kept, run=first) == 0
    second = Runs(make_run)
    other = config_for(tmp_path, SPEC, run__run_dir=str(tmp_path / "second"), job__job_id="again")
    assert verify_command(other, kept, run=second) == 0
    assert (len(first.commands), len(second.commands)) == (2, 1)
    changed = config_for(
        tmp_path, SPEC, run__run_dir=str(tmp_path / "third"), run__script_args=["--steps", "7"]
    )
    with pytest.raises(ConfigError, match="of another command"):
        verify_command(changed, kept, run=Runs(make_run))
    (tmp_path / "train.py").write_text("print('something else')\n")
    with pytest.raises(ConfigError, match="of another command"):
        verify_command(
            config_for(tmp_path, SPEC, run__run_dir=str(tmp_path / "4th")), kept, run=Runs(make_run)
        )


def test_used_folders_and_other_machines_are_refused(tmp_path: Path, make_run: MakeRun) -> None:
    config = config_for(tmp_path, SPEC)
    make_run(tmp_path / "runs" / "disturbed")
    with pytest.raises(ConfigError, match="not empty"):
        verify_command(config, run=Runs(make_run))
    remote = config_for(tmp_path, SPEC, run__standalone=None, membership__etcd="h:1")
    with pytest.raises(ConfigError, match="give --standalone"):
        verify_command(remote, run=Runs(make_run))


def test_the_runs_share_no_checkpoints_job_ids_or_files(tmp_path: Path) -> None:
    config = config_for(
        tmp_path,
        SPEC,
        checkpoint__dir="ckpt",
        job__job_id="j",
        run__events="e.jsonl",
        run__report="r.json",
        run__rehearse=False,
    )
    before = undisturbed_arguments(config, Path("a/undisturbed"))
    after = disturbed_arguments(config, Path("a/disturbed"))
    assert option(before, "--checkpoint-dir") == "a/undisturbed/checkpoints"
    assert option(after, "--checkpoint-dir") == "a/disturbed/checkpoints"
    assert (option(before, "--job-id"), option(after, "--job-id")) == ("j-undisturbed", "j-disturbed")
    assert "--events" not in before and "--report" not in before
    assert (option(after, "--events"), option(after, "--report")) == ("e.jsonl", "r.json")
    assert "--no-rehearse" in before and "--no-rehearse" in after


def test_run_arguments_are_understood_by_run_itself(tmp_path: Path) -> None:
    config = config_for(tmp_path, SPEC, run__respawn=True, liveness__silence_dead_s=4.5, run__rehearse=False)
    code = (
        "import sys; from deadpool.cli import options\n"
        "import typer\n"
        "app = typer.Typer()\n"
        "def show(config):\n"
        "    print(repr((config.job, config.liveness, config.run)))\n"
        "    return 0\n"
        "app.command(context_settings=options.CONTEXT_SETTINGS)(options.with_run_options(show))\n"
        "app()\n"
    )
    arguments = disturbed_arguments(config, tmp_path / "x")
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, timeout=30
    )
    expected = replace(config.run, run_dir=str(tmp_path / "x"), record_dir=str(tmp_path / "x" / "records"))
    assert done.stdout.strip() == repr((config.job, config.liveness, expected))
    assert isinstance(expected, RunConfig)


def test_a_stopped_verify_stops_its_run(tmp_path: Path) -> None:
    """The run is told, and its own exit code comes back."""
    code = (
        "import sys; from deadpool.cli import verify\n"
        "sys.executable = sys.argv[1]\n"
        "print(verify.run_process(['x']))\n"
    )
    fake = tmp_path / "python"
    fake.write_text(
        '#!/bin/sh\ntrap "exit 143" TERM\necho ready\nwhile :; do read line || sleep 0.05; done\n'
    )
    fake.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(fake)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.read() == "143\n"
    assert process.wait(10) == 0
    process.stdout.close()
