from __future__ import annotations

import json
import resource
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deadpool.cli.report import build_report, leave_reports, print_timeline, read_report, write_report
from deadpool.cli.rundir import merge_events, read_agents, read_events, read_workers
from deadpool.config import Config, JobConfig, RunConfig
from deadpool.report import report_schema, status_schema
from deadpool.runtime.result import note_agent, note_worker

CONFIG = replace(Config(), job=JobConfig(nnodes=2, spares=1, job_id="j"))

MakeRun = Callable[..., Path]
Line = dict[str, object]


def append(path: Path, *lines: Line) -> None:
    with open(path, "a") as file:
        for line in lines:
            file.write(json.dumps({"run_id": "r", "member": "h0-a", "generation": 2, **line}) + "\n")


def test_the_report_tells_cause_phases_and_outcome_of_a_recovery(tmp_path: Path, make_run: MakeRun) -> None:
    report = build_report(make_run(tmp_path, disturbed=True), CONFIG, 0)
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
    report = build_report(run_dir, CONFIG, 0)
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
    first, second = build_report(run_dir, CONFIG, 0).recoveries
    assert first.is_done and not second.is_done
    assert second.seconds is None
    assert "detect" not in second.phases  # the injection was answered by the first


def recovery_event(name: str, generation: int, wall_s: float, clock_s: float, **fields: object) -> Line:
    head = {"event": f"recovery.{name}", "generation": generation, "wall_s": 1e9 + wall_s}
    return {**head, "monotonic_s": clock_s, **fields}


def test_seconds_between_machines_are_those_of_the_day_and_on_one_machine_those_of_its_clock(
    tmp_path: Path,
) -> None:
    """One has been up for a minute, the other for a month; the time of day of that one is then set back."""
    done = {"rollback_step": 3, "rollback_generation": 1, "lost_steps": 1}
    append(tmp_path / "events-h0-a.jsonl", recovery_event("begin", 2, 100.0, 60.0, ranks=[1]))
    other = {"member": "h1-a"}
    append(
        tmp_path / "events-h1-a.jsonl",
        {**recovery_event("done", 2, 106.0, 2.5e6, **done), **other},
        {**recovery_event("begin", 3, 200.0, 2.5e6 + 100.0), **other},
        {**recovery_event("done", 3, 201.0, 2.5e6 + 102.0, **done), **other},
    )
    struck = {"index": 0, "spec": "sigkill:rank=1@step=4", "kind": "sigkill", "rank": 1, "step": 4, "pid": 7}
    (tmp_path / "injections").mkdir()
    append(
        tmp_path / "injections" / "0.json",
        {**struck, "point": "collective", "monotonic_s": 2.5e6 - 8.0, "wall_s": 1e9 + 99.5},
    )
    first, second = build_report(tmp_path, CONFIG, 0).recoveries
    assert first.phases == pytest.approx({"detect": 0.5})
    assert [first.seconds, second.seconds] == pytest.approx([6.5, 2.0])
    assert "detect" not in second.phases


def test_a_recovery_that_takes_several_attempts_counts_from_the_first(tmp_path: Path) -> None:
    done = {"rollback_step": 3, "rollback_generation": 1, "lost_steps": 1}
    append(
        tmp_path / "events-h0-a.jsonl",
        recovery_event("begin", 2, 100.0, 100.0),
        recovery_event("begin", 3, 110.0, 110.0),
        recovery_event("begin", 4, 140.0, 140.0),
        recovery_event("done", 4, 195.0, 195.0, **done),
        recovery_event("begin", 5, 300.0, 300.0),
        # Its leader was lost before it could say that all run again.
        {**recovery_event("begin", 5, 310.0, 310.0), "event": "view.adopted", "phase": "running"},
        recovery_event("begin", 6, 900.0, 900.0),
        recovery_event("done", 6, 902.0, 902.0, **done),
    )
    recoveries = build_report(tmp_path, CONFIG, 0).recoveries
    assert [each.seconds for each in recoveries] == [None, None, 95.0, None, 2.0]


def test_the_protected_step_is_that_of_the_newest_commit_not_the_highest(tmp_path: Path) -> None:
    path = tmp_path / "events-h0-a.jsonl"
    commit = {"event": "snapshot.committed", "wall_s": 1e9, "monotonic_s": 1.0, "generation": 1}
    append(path, {**commit, "step": 5000})
    assert build_report(tmp_path, CONFIG, 0).protected_step == 5000
    append(path, recovery_event("begin", 2, 1.0, 1.0), recovery_event("done", 2, 2.0, 2.0, rollback_step=300))
    assert build_report(tmp_path, CONFIG, 0).protected_step == 300
    append(path, {**commit, "generation": 2, "step": 310})
    assert build_report(tmp_path, CONFIG, 0).protected_step == 310


def test_the_timeline_is_a_few_lines_a_recovery(tmp_path: Path, make_run: MakeRun) -> None:
    lines: list[str] = []
    print_timeline(build_report(make_run(tmp_path, disturbed=True), CONFIG, 0), lines.append)
    assert lines == [
        "recovery 1 of 1, generation 2: worker_exit of rank 1 on h1",
        "  cause       rank 1 was killed",
        "  seconds     detect 0.10 + abort 0.20 + fetch 0.30, 0.90 s since the first fault",
        "  went back   to step 3, 0 steps lost",
        "  source      replica",
    ]
    lines.clear()
    print_timeline(build_report(make_run(tmp_path / "calm"), CONFIG, 0), lines.append)
    assert lines == ["no recovery was needed"]


def test_a_report_is_read_as_it_was_written(tmp_path: Path, make_run: MakeRun) -> None:
    report = build_report(make_run(tmp_path, disturbed=True), CONFIG, 0)
    path = tmp_path / "out" / "report.json"
    write_report(report, path)
    assert read_report(path) == report
    assert json.loads(path.read_text())["recoveries"][0]["cause"]["kind"] == "worker_exit"


def test_an_empty_folder_gives_an_empty_report(tmp_path: Path) -> None:
    report = build_report(tmp_path, CONFIG, 4)
    assert (report.exit_code, report.reason) == (4, "")
    assert (report.generations, report.protected_step) == ((), None)


@pytest.mark.parametrize(
    ("code", "given", "reason"),
    [
        (1, "The script failed on one node.", "The script failed on one node."),
        (1, "", "its device is bad"),  # of the host that ended so, not of the last one
        (0, "", "all ranks finished"),
        (143, "", "SIGTERM"),  # nobody said anything
        (130, "", "Ctrl-C"),
    ],
)
def test_the_report_ends_with_the_code_of_the_job_whatever_the_hosts_said_last(
    tmp_path: Path, make_run: MakeRun, code: int, given: str, reason: str
) -> None:
    run_dir = make_run(tmp_path)
    failed = {"event": "agent.failed", "exit_code": 1, "reason": "its device is bad"}
    append(run_dir / "events-h1-a.jsonl", {**failed, "wall_s": 1e9 + 8, "monotonic_s": 8.0})
    report = build_report(run_dir, CONFIG, code, given)
    assert (report.exit_code, report.reason) == (code, reason)


def test_reports_that_cannot_be_written_are_said_in_a_line_each_and_keep_nothing_back(
    tmp_path: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, no_folder = make_run(tmp_path, disturbed=True), tmp_path / "file"
    no_folder.touch()
    events, report = tmp_path / "events.jsonl", tmp_path / "report.json"
    for path in (
        (no_folder / "events", no_folder / "report"),
        (no_folder / "events", report),
        (events, report),
    ):
        run = RunConfig(events=str(path[0]), report=str(path[1]))
        leave_reports(run_dir, replace(CONFIG, run=run), 143, "SIGTERM")
        output = capsys.readouterr()
        assert len(output.err.splitlines()) == len([each for each in path if no_folder in each.parents])
        assert [each.exists() for each in path] == [each.parent == tmp_path for each in path]
    assert "recovery 1 of 1" in output.out
    assert sorted(path.name for path in tmp_path.glob(".*")) == []


def test_events_of_all_hosts_are_merged_by_time_and_torn_and_odd_lines_skipped(
    tmp_path: Path, make_run: MakeRun
) -> None:
    run_dir = make_run(tmp_path, disturbed=True)
    with open(run_dir / "events-h0-a.jsonl", "a") as file:
        file.write('\n[1]\n{"event": 5, "wall_s": 1}\n{"event": "run.finished"}\n{"event": "run.fin')
    events = read_events(run_dir)
    assert [event["wall_s"] for event in events] == sorted(event["wall_s"] for event in events)
    merge_events(run_dir, tmp_path / "all" / "events.jsonl")
    lines = (tmp_path / "all" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == events


def write_commits(path: Path, first_s: float, count: int) -> None:
    head = {"member": path.stem, "generation": 1, "monotonic_s": 1.0}
    with open(path, "w") as file:
        for step in range(count):
            line = {"event": "snapshot.committed", **head, "wall_s": first_s + step, "step": step}
            file.write(json.dumps(line) + "\n")


def test_files_of_more_hosts_are_merged_than_a_process_may_open_at_first(tmp_path: Path) -> None:
    for host in range(100):
        write_commits(tmp_path / f"events-h{host:03}-a.jsonl", host / 1000, 2)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
    try:
        merge_events(tmp_path, tmp_path / "all.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    moments = [json.loads(line)["wall_s"] for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert moments == sorted(moments)
    assert len(moments) == 200


def test_merging_holds_a_line_of_each_host_and_not_a_day_of_them(tmp_path: Path) -> None:
    for host in range(2):
        write_commits(tmp_path / f"events-h{host}-a.jsonl", host / 10, 10_000)
    tracemalloc.start()
    try:
        merge_events(tmp_path, tmp_path / "all.jsonl")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    size = (tmp_path / "all.jsonl").stat().st_size
    assert peak < size / 4, f"{peak} bytes of memory for {size} bytes of events"


def test_the_report_is_made_without_the_events_of_each_step(tmp_path: Path) -> None:
    path = tmp_path / "events-h0-a.jsonl"
    write_commits(path, 1.0, 3)
    refused = {"event": "snapshot.refused", "step": 3, "reason": "late", "wall_s": 9.0, "monotonic_s": 9.0}
    append(path, refused, {**refused, "event": "worker.exited"})
    kept = [(event["event"], event.get("step")) for event in read_events(tmp_path, has_every_step=False)]
    assert kept == [("snapshot.committed", 2), ("worker.exited", 3)]
    assert [event["event"] for event in read_events(tmp_path)].count("snapshot.refused") == 1


def test_a_report_made_without_the_events_of_some_hosts_says_so(
    tmp_path: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, report = make_run(tmp_path), tmp_path / "report.json"
    for nnodes, is_whole in (2, True), (3, False):
        job = JobConfig(nnodes=nnodes, spares=0, job_id="j")
        leave_reports(run_dir, Config(job=job, run=RunConfig(report=str(report))), 0)
        assert read_report(report).agents_seen == 2
        assert ("--run-dir" in capsys.readouterr().err) is not is_whole


def test_agents_and_workers_of_all_hosts_are_read_from_a_file_each(tmp_path: Path) -> None:
    for member, generation in ("h0-a", 1), ("h2-c", 2), ("h1-b", 3):  # the host h0 was lost, and then h2
        note_agent(tmp_path, member, "127.0.0.1", generation)
        note_worker(tmp_path, member, 0, 70 + generation, generation, "active")
    assert [line.pid for line in read_workers(tmp_path)] == [71, 72, 73]
    assert {line.host: line.address for line in read_agents(tmp_path)} == {
        "h0": "127.0.0.1:1",
        "h1": "127.0.0.1:3",
        "h2": "127.0.0.1:2",
    }


def test_both_schemas_name_their_fields() -> None:
    report = report_schema()["$defs"]["Report"]["properties"]
    assert {"generations", "recoveries", "protected_step", "bytes_sent", "digests", "step_times"} <= set(
        report
    )
    status = status_schema()["$defs"]["JobStatus"]["properties"]
    assert {"hosts", "ranks", "protected", "degraded", "generation", "recoveries"} <= set(status)
