"""What CPUs cannot show of the DeepSpeed plugin: loss scaling, its fused Adam, copies on a side stream."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fused", [False, True], ids=["torch", "fused"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_engine_on_a_gpu_that_is_set_back_trains_on_as_before(stage: int, dtype: str, fused: bool) -> None:
    from tests.plugins.deepspeed.engines import Kind, trainer
    from tests.plugins.deepspeed.test_state import go_back_and_on, outcome
    from tests.unit.snapshot.support import keeping

    with trainer(Kind(stage=stage, dtype=dtype, fused=fused)) as own:
        with keeping(own.state) as keeper:
            for number in range(3):
                own.step(number)
            blob = keeper.take(3)
            expected = outcome(own, 3, 6)
            assert go_back_and_on(own, keeper, blob) == expected
