from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deadpool.cli.report import build_report, print_timeline, read_report, write_report
from deadpool.cli.rundir import merge_events, read_events
from deadpool.config import Config, JobConfig
from deadpool.report import report_schema, status_schema

CONFIG = replace(Config(), job=JobConfig(nnodes=2, spares=1, job_id="j"))

MakeRun = Callable[..., Path]


def append(path: Path, *lines: dict[str, object]) -> None:
    with open(path, "a") as file:
        for line in lines:
            file.write(json.dumps({"run_id": "r", "member": "h0-a", "generation": 2, **line}) + "\n")


def test_the_report_tells_cause_phases_and_outcome_of_a_recovery(tmp_path: Path, make_run: MakeRun) -> None:
    report = build_report(make_run(tmp_path, disturbed=True), CONFIG)
    (recovery,) = report.recoveries
    assert (recovery.generation, recovery.cause.kind, recovery.cause.ranks) == (2, "worker_exit", (1,))
    assert (recovery.cause.host, recovery.cause.member) == ("h1", "h1-a")
    # Detection counts from the injection, which only the report knows; a phase is its slowest host's.
    assert recovery.phases == pytest.approx({"detect": 0.1, "abort": 0.2, "fetch": 0.3})
    assert recovery.seconds == pytest.approx(0.9)
    assert (recovery.rollback_step, recovery.lost_steps, recovery.source) == (3, 0, "replica")
    assert (report.exit_code, report.protected_step, report.job_id) == (0, 3, "j")
    assert [generation.slots for generation in report.generations] == [("h0-a", "h1-a"), ("h0-a", "h2-a")]
    assert [(worker.rank, worker.pid, worker.role) for worker in report.workers] == [
        (0, 100, "active"),
        (1, 101, "active"),
        (1, 200, "promoted"),
    ]
    assert report.injections[0].spec == "sigkill:rank=1@step=4"
    assert report.digests["1"] == {"weight": "a1", "bias": "b0", "blob:rng.torch": "c1", "blob:data": "d0"}
    assert report.degraded == ("rank 1 has no replica",)


def test_summaries_give_bytes_memory_and_step_times(tmp_path: Path, make_run: MakeRun) -> None:
    run_dir = make_run(tmp_path)
    times = {"steps": 6, "step_p50_s": 0.05, "step_p90_s": 0.06, "step_p99_s": 0.07, "step_max_s": 0.2}
    append(
        run_dir / "events-h0-a.jsonl",
        {
            "event": "agent.summary",
            "bytes_sent": 100,
            "host_memory_bytes": 4096,
            "wall_s": 1,
            "monotonic_s": 1,
        },
        {"event": "agent.summary", "member": "h1-a", "bytes_sent": 11, "wall_s": 1, "monotonic_s": 1},
        {"event": "worker.summary", "rank": 0, "wall_s": 1, "monotonic_s": 1, **times},
        {"event": "worker.summary", "rank": 1, "wall_s": 1, "monotonic_s": 1, **times, "step_p50_s": 0.055},
    )
    report = build_report(run_dir, CONFIG)
    assert report.bytes_sent == 111
    assert report.host_memory_bytes == {"h0-a": 4096, "h1-a": 0}
    assert report.step_times is not None
    assert (report.step_times.p50_s, report.step_times.max_s) == (0.055, 0.2)
    assert report.recoveries == ()


def test_a_recovery_that_a_newer_generation_took_over_is_kept_as_unfinished(
    tmp_path: Path, make_run: MakeRun
) -> None:
    run_dir = make_run(tmp_path, disturbed=True)
    begin = {"event": "recovery.begin", "wall_s": 1e9 + 7, "monotonic_s": 7.0, "kind": "collective"}
    append(run_dir / "events-h0-a.jsonl", {**begin, "generation": 3, "ranks": []})
    first, second = build_report(run_dir, CONFIG).recoveries
    assert first.is_done and not second.is_done
    assert second.seconds is None
    assert "detect" not in second.phases  # the injection was answered by the first


def test_the_timeline_is_a_few_lines_a_recovery(tmp_path: Path, make_run: MakeRun) -> None:
    lines: list[str] = []
    print_timeline(build_report(make_run(tmp_path, disturbed=True), CONFIG), lines.append)
    assert lines == [
        "recovery 1 of 1, generation 2: worker_exit of rank 1 on h1",
        "  cause       rank 1 was killed",
        "  seconds     detect 0.10 + abort 0.20 + fetch 0.30 = 0.90 s",
        "  went back   to step 3, 0 steps lost",
        "  source      replica",
    ]
    lines.clear()
    print_timeline(build_report(make_run(tmp_path / "calm"), CONFIG), lines.append)
    assert lines == ["no recovery was needed"]


def test_a_report_is_read_as_it_was_written(tmp_path: Path, make_run: MakeRun) -> None:
    report = build_report(make_run(tmp_path, disturbed=True), CONFIG)
    path = tmp_path / "out" / "report.json"
    write_report(report, path)
    assert read_report(path) == report
    assert json.loads(path.read_text())["recoveries"][0]["cause"]["kind"] == "worker_exit"


def test_an_empty_folder_gives_an_empty_report(tmp_path: Path) -> None:
    report = build_report(tmp_path, CONFIG)
    assert (report.exit_code, report.generations, report.protected_step) == (None, (), None)


def test_events_of_all_hosts_are_merged_by_time_and_torn_lines_skipped(
    tmp_path: Path, make_run: MakeRun
) -> None:
    run_dir = make_run(tmp_path, disturbed=True)
    with open(run_dir / "events-h0-a.jsonl", "a") as file:
        file.write('{"event": "run.fin')
    events = read_events(run_dir)
    assert [event["wall_s"] for event in events] == sorted(event["wall_s"] for event in events)
    merge_events(run_dir, tmp_path / "all" / "events.jsonl")
    assert len((tmp_path / "all" / "events.jsonl").read_text().splitlines()) == len(events)


def test_both_schemas_name_their_fields() -> None:
    report = report_schema()["$defs"]["Report"]["properties"]
    assert {"generations", "recoveries", "protected_step", "bytes_sent", "digests", "step_times"} <= set(
        report
    )
    status = status_schema()["$defs"]["JobStatus"]["properties"]
    assert {"hosts", "ranks", "protected", "degraded", "generation", "recoveries"} <= set(status)
