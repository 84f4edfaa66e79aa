"""Files of a run: how it ended, who ran, and what the steps recorded."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path

import pytest
import torch

from deadpool.core.types import Phase
from deadpool.runtime.records import StepRecords, digest
from deadpool.runtime.result import (
    RunResult,
    note_agent,
    note_worker,
    read_result,
    write_json,
    write_result,
)
from tests.unit.runtime.support import WAIT_S, make_view, read_events

# ---- result.json, agents and workers -------------------------------------------------------------------


def test_a_result_reads_back_as_it_was_written(tmp_path: Path) -> None:
    view = make_view(["a", "b"], Phase.FINISHED, generation=4)
    write_result(tmp_path, view, [11, 12])
    assert read_result(tmp_path) == RunResult(
        exit_code=0,
        reason="The test says so.",
        generation=4,
        phase="finished",
        pids=(11, 12),
        members=("a", "b"),
    )


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"exit_code": "none"}', b"\xff\xfe"])
def test_a_result_that_cannot_be_read_is_as_if_nobody_had_said_anything(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "result.json").write_bytes(content)
    assert read_result(tmp_path) == RunResult()
    assert read_result(tmp_path / "no such folder") == RunResult()
    assert "no host" in RunResult().reason


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "file.json"
    write_json(path, {"before": list(range(1000))})
    write_json(path, {"after": 1})
    assert json.loads(path.read_text()) == {"after": 1}
    assert os.listdir(path.parent) == ["file.json"]


def test_lines_of_many_members_never_mix_nor_meet_in_a_file(tmp_path: Path) -> None:
    def write(member: int) -> None:
        for step in range(20):
            note_agent(tmp_path, f"h{member}", "127.0.0.1", 1000 + step)
            note_worker(tmp_path, f"h{member}", member, 77, step, "active")

    threads = [threading.Thread(target=write, args=(member,)) for member in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert read_events(tmp_path / "agents-h3.jsonl")[19] == {"member": "h3", "address": "127.0.0.1:1019"}
    workers = read_events(tmp_path / "workers-h2.jsonl")
    assert {(line["member"], line["rank"], line["role"]) for line in workers} == {("h2", 2, "active")}
    assert [line["generation"] for line in workers] == list(range(20))
    assert len(os.listdir(tmp_path)) == 8


# ---- records -------------------------------------------------------------------------------------------


def _lines(folder: Path, rank: int = 0) -> list[dict[str, object]]:
    return read_events(folder / f"rank-{rank}.jsonl")


def test_values_count_once_their_step_is_finished_and_not_before(tmp_path: Path) -> None:
    records = StepRecords(tmp_path, 3)
    records.add({"loss": 0.5})
    assert _lines(tmp_path, 3) == []
    records.commit(2, 7)
    records.commit(2, 8)  # nothing was recorded in it
    (line,) = _lines(tmp_path, 3)
    assert (line["g"], line["s"], line["n"], line["p"]) == (2, 7, "loss", os.getpid())
    records.close()


def test_the_values_of_an_aborted_step_are_dropped(tmp_path: Path) -> None:
    records = StepRecords(tmp_path, 0)
    records.add({"loss": 0.5})
    records.drop()
    records.add({"loss": 0.25})
    records.commit(2, 7)
    assert [line["s"] for line in _lines(tmp_path)] == [7]
    assert len(_lines(tmp_path)) == 1
    records.close()


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([[1.5, -0.0], [math.inf, math.nan]]),
        torch.arange(6, dtype=torch.int64).reshape(2, 3).t(),  # not contiguous
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        torch.tensor(True),
        torch.zeros(0, 4),
        torch.tensor([2.0], requires_grad=True),
    ],
)
def test_a_tensor_is_recorded_with_every_bit(tmp_path: Path, value: torch.Tensor) -> None:
    records = StepRecords(tmp_path, 0)
    records.add({"x": value})
    records.commit(1, 1)
    records.close()
    (line,) = _lines(tmp_path)
    dtype, data = getattr(torch, str(line["d"])), bytes.fromhex(str(line["b"]))
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    shape = line["sh"]
    assert isinstance(shape, list)
    found = flat.reshape(shape)
    assert found.shape == value.shape
    assert digest(found) == digest(value)


def test_what_is_recorded_later_changed_is_as_it_was(tmp_path: Path) -> None:
    records = StepRecords(tmp_path, 0)
    weight = torch.ones(2)
    records.add({"weight": weight})
    weight.zero_()
    records.commit(1, 1)
    records.close()
    assert _lines(tmp_path)[0]["b"] == bytes(torch.ones(2).numpy().tobytes()).hex()


@pytest.mark.parametrize("value", [3, 2.5, True])
def test_numbers_are_recorded_as_doubles(tmp_path: Path, value: float) -> None:
    records = StepRecords(tmp_path, 0)
    records.add({"x": value})
    records.commit(1, 1)
    records.close()
    (line,) = _lines(tmp_path)
    assert (line["d"], line["sh"]) == ("float64", [])
    assert line["b"] == torch.tensor(value, dtype=torch.float64).numpy().tobytes().hex()


@pytest.mark.parametrize("is_recording", [True, False])
def test_other_kinds_are_refused_by_name_whether_anybody_reads_them_or_not(
    tmp_path: Path, is_recording: bool
) -> None:
    records = StepRecords(tmp_path if is_recording else None, 0)
    for value in ("text", None, [1.0], {"a": 1}):
        with pytest.raises(TypeError, match=f"loss.*{type(value).__name__}"):
            records.add({"loss": value})
    records.close()


def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    records = StepRecords(None, 0)
    records.add({"loss": 0.5})
    records.commit(1, 1)
    records.close()
    assert list(tmp_path.iterdir()) == []


def test_a_later_life_of_the_rank_appends(tmp_path: Path) -> None:
    for generation in (1, 2):
        records = StepRecords(tmp_path, 0)
        records.add({"loss": 0.5})
        records.commit(generation, 1)
        records.close()
    assert [line["g"] for line in _lines(tmp_path)] == [1, 2]


def test_digests_tell_apart_bits_dtypes_and_shapes() -> None:
    one = torch.tensor([0.0, 1.0])
    others = [
        torch.tensor([-0.0, 1.0]),
        torch.tensor([[0.0, 1.0]]),
        torch.tensor([0.0, 1.0]).view(torch.int32),
        torch.tensor([0.0, 1.0], dtype=torch.float64),
    ]
    assert digest(one) == digest(one.clone())
    assert len({digest(tensor) for tensor in (one, *others)}) == 5
