from __future__ import annotations

import ast
import contextlib
import json
import threading
from pathlib import Path

import pytest

import deadpool
from deadpool.events import EVENTS, RECOVERY_PHASES, EventLog, boottime_s


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_carries_who_when_and_what(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events-h0.jsonl"
    log = EventLog(path, "run-1", "h0-abc", strict=True)
    before_s = boottime_s()
    log.emit("recovery.phase", generation=2, phase="fetch", seconds=0.25, rank=3)
    log.close()
    (line,) = lines_of(path)
    assert before_s - 0.001 <= float(str(line.pop("monotonic_s"))) <= boottime_s() + 0.001
    assert float(str(line.pop("wall_s"))) > 1.7e9
    assert line == {
        "event": "recovery.phase",
        "run_id": "run-1",
        "member": "h0-abc",
        "generation": 2,
        "phase": "fetch",
        "seconds": 0.25,
        "rank": 3,
    }


def test_lines_of_many_threads_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, "run", "h0", strict=True)

    def write(rank: int) -> None:
        for step in range(200):
            log.emit("snapshot.committed", generation=1, step=step, rank=rank)

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert len(lines_of(path)) == 800


def test_a_strict_log_refuses_unknown_names_reserved_fields_and_objects(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", "run", "h0", strict=True)
    with pytest.raises(ValueError, match="not in the catalogue"):
        log.emit("recovery.finished")
    with pytest.raises(ValueError, match="written by the log itself"):
        log.emit("run.finished", wall_s=1.0)
    with pytest.raises(TypeError, match="Path is not a plain JSON value"):
        log.emit("checkpoint.complete", path=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="set is not"):
        log.emit("fault.reported", ranks=[{1}])  # type: ignore[list-item]
    log.close()
    assert (tmp_path / "events.jsonl").read_text() == ""


def test_a_lenient_log_writes_even_a_slip(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, "run", "h0")
    log.emit("no.such.event", where=tmp_path, member="forged")  # type: ignore[arg-type]
    log.close()
    (line,) = lines_of(path)
    assert (line["event"], line["where"], line["member"]) == ("no.such.event", str(tmp_path), "h0")


def test_chosen_events_give_one_short_line_even_with_fields_missing(tmp_path: Path) -> None:
    shown: list[str] = []
    log = EventLog(None, "run", "h0", console=shown.append, strict=True)
    log.emit("recovery.done", generation=2, seconds=1.234, source="replica", rollback_step=6, lost_steps=0)
    log.emit("recovery.done", generation=3)
    log.emit("liveness.silent", subject="h1", age_s="long")
    log.emit("snapshot.committed", generation=1, step=3)
    log.close()
    assert shown == [
        "recovered in 1.23 s: back to step 6 (replica), 0 steps lost",
        "recovered in ? s: back to step ? (?), ? steps lost",
        "generation=0 subject=h1 age_s=long",
    ]


def test_a_full_disk_ends_nothing() -> None:
    log = EventLog(Path("/dev/full"), "run", "h0", strict=True)
    log.emit("run.finished")
    log.emit("run.finished", exit_code=0, reason="done")
    assert log.lost_lines == 2
    log.close()


def test_a_console_that_nobody_reads_any_more_ends_nothing(tmp_path: Path) -> None:
    with open("/dev/full", "w", buffering=1) as full:

        def say(line: str) -> None:
            print(line, file=full, flush=True)

        log = EventLog(tmp_path / "events.jsonl", "run", "h0", strict=True, console=say)
        for _ in range(2):
            log.emit("run.finished", exit_code=0, reason="done")
        log.close()
        with contextlib.suppress(OSError):
            full.close()
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 2


def test_every_name_has_a_sentence_and_the_phases_are_those_of_the_design() -> None:
    assert all(text.strip() and "\n" not in text for text in EVENTS.values())
    assert RECOVERY_PHASES == ("detect", "abort", "agree", "fetch", "rebuild", "restore", "first_step")


def test_every_event_that_the_code_emits_is_in_the_catalogue() -> None:
    root = Path(deadpool.__file__).parent
    unknown = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "emit"
            ):
                name = node.args[0] if node.args else None
                if isinstance(name, ast.Constant) and name.value not in EVENTS:
                    unknown.append(f"{path.relative_to(root)}:{node.lineno}: {name.value!r}")
    assert unknown == []
