"""What real scripts use beside the collectives of DDP, each through a real recovery; the job is features.py.

One run for all: a worker is killed in step 7, and each test looks at what one feature recorded afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from deadpool.cli.compare import read_records
from tests.scenarios.features import OVERFLOWS, SAVED
from tests.verifying import YES, verify

STEPS, STRUCK = 14, 7
Values = dict[int, bytes]  # by step

pytestmark = pytest.mark.timeout(240)


def verify_features(folder: Path, *arguments: str) -> list[str]:
    options = ("--nnodes", "2", "--spares", "1", "--run-dir", str(folder))
    script = ("tests/scenarios/features.py", "--steps", str(STEPS), *arguments)
    code, lines = verify(*options, "--inject", f"sigkill:rank=1@step={STRUCK}", *script, limit_s=220)
    assert (code, lines[-1]) == (0, YES), "\n".join(lines[-60:])
    return lines


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    global _folder
    _folder = tmp_path_factory.mktemp("features")
    return verify_features(_folder)


_folder = Path()


def recorded(name: str, rank: int, run: str = "disturbed") -> Values:
    """The bytes of one recorded value. That both runs have the same is what `output` has checked."""
    found: dict[int, bytes] = defaultdict(bytes)
    for step, values in read_records(_folder / run, rank).items():
        for each, _, _, hexadecimal in values:
            if each == name:
                found[step] = bytes.fromhex(hexadecimal)
    return dict(found)


def double(data: bytes) -> float:
    return memoryview(data).cast("d")[0]


def test_batch_norm_buffers_go_on_bit_for_bit(output: list[str]) -> None:
    for rank in (0, 1):
        values = recorded("batch_norm", rank)
        assert sorted(values) == list(range(1, STEPS + 1))
        assert len(set(values.values())) == STEPS  # each forward changes them


def test_an_average_of_the_weights_goes_on_bit_for_bit(output: list[str]) -> None:
    for rank in (0, 1):
        values = recorded("average", rank)
        assert len(set(values.values())) == STEPS  # it moves in skipped steps, too


def test_a_grad_scaler_goes_on_with_its_scale_and_its_count_of_good_steps(output: list[str]) -> None:
    for rank in (0, 1):
        scales = {step: double(value) for step, value in recorded("scale", rank).items()}
        for step in OVERFLOWS:
            assert scales[step] == scales[step - 1] / 2
        growths = [step for step in range(2, STEPS + 1) if scales[step] == scales[step - 1] * 2]
        # Three good steps each: 4-6 and, with the recovery in between, 10-12. Step 9 overflows too early.
        assert growths == [6, 12]


def test_object_collectives_and_barriers_work_after_a_recovery(output: list[str]) -> None:
    objects = [recorded("objects", rank) for rank in (0, 1)]
    assert objects[0] == objects[1] and len(objects[0]) == STEPS


def test_a_group_made_in_train_works_after_a_recovery(output: list[str]) -> None:
    for rank in (0, 1):
        sums = {step: memoryview(value).cast("f")[0] for step, value in recorded("group", rank).items()}
        assert sums == {step: 2.0 * step + 1.0 for step in range(1, STEPS + 1)}


def test_a_distributed_checkpoint_is_written_through_the_handles_after_a_recovery(output: list[str]) -> None:
    for rank in (0, 1):
        values = recorded("checkpoint", rank)
        assert sorted(values) == list(SAVED) and min(SAVED) < STRUCK < max(SAVED)
        assert len(set(values.values())) == len(SAVED)


def test_a_script_that_destroys_its_process_group_ends_in_order(output: list[str]) -> None:
    for rank in (0, 1):  # in both runs, also on the spare that took over
        assert sum(f"rank {rank} ended in order" in line for line in output) == 2


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        ("--compile", "aot_eager"),
        ("--compile", "inductor"),
        ("--parallel", "fsdp2", "--compile", "aot_eager"),
    ],
    ids=["ddp, aot_eager", "ddp, inductor", "fsdp2, aot_eager"],
)
def test_a_compiled_model_goes_on_bit_for_bit(arguments: tuple[str, ...], tmp_path: Path) -> None:
    verify_features(tmp_path, *arguments)


@pytest.mark.full
def test_sharded_models_have_the_same_features(tmp_path: Path) -> None:
    verify_features(tmp_path, "--parallel", "fsdp2")
