"""DeepSpeed under DeadPool: change one import, and give the engine to `wrap`.

    import deadpool
    from deadpool.plugins import deepspeed      # instead of `import deepspeed`

    engine, *_ = deepspeed.initialize(model=model, config=config)

    def train(ft):
        for step in ft.steps(total_steps):
            ...
            engine.backward(loss)
            engine.step()

    deadpool.wrap(train, engine=engine, data=loader)()

Every attribute that this module does not define is DeepSpeed's own. Reaching for one joins the job first, if
there is one: DeepSpeed keeps a `torch.distributed` that is already initialised, whoever asks for it
(`init_distributed`, `zero.Init`).
"""

from __future__ import annotations

import functools as _functools
import inspect as _inspect
import os as _os
from typing import Any

import deepspeed as _deepspeed
import torch.distributed as _dist
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from deepspeed.runtime.engine import DeepSpeedEngine

import deadpool
from deadpool.errors import ConfigError
from deadpool.plugins.deepspeed.engine import EngineAdapter
from deadpool.plugins.deepspeed.process import forget_process, switch_off_shared_memory
from deadpool.plugins.deepspeed.settings import Settings, check_version, split_config
from deadpool.runtime.worker import current_worker
from deadpool.snapshot.adapter import register_adapter, register_forgetter

__all__ = ["initialize"]

_BY_MPI = {"OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE"}
"""Set by launchers of MPI programs."""


@_functools.wraps(_deepspeed.initialize)
def initialize(*args: Any, **kwargs: Any) -> Any:
    """`deepspeed.initialize`, within the job.

    Same arguments and return value. The configuration may have a section "deadpool"; see `Settings`.

    Raises:
        ConfigError: the section has keys that DeadPool does not know; lists all.
    """
    call = _inspect.signature(_deepspeed.initialize).bind(*args, **kwargs)
    settings = split_config(call.arguments)
    _join(settings)
    return _deepspeed.initialize(*call.args, **call.kwargs)


def __getattr__(name: str) -> Any:
    if name.startswith("_") and name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if current_worker() is not None:
        _join(Settings())
    return getattr(_deepspeed, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_deepspeed)})


def _join(settings: Settings) -> None:
    """Join the job if the script has not yet; see `deadpool.init`."""
    if current_worker() is None and not _BY_MPI.isdisjoint(_os.environ):
        return  # unprotected, and DeepSpeed asks MPI who is who
    settings.join(deadpool.init)
    if _dist.get_world_size() == 1:
        _os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it; no launcher has set it


def _refuse_optimizer(name: str, optimizer: Any) -> Any:
    raise ConfigError(
        [
            f"{name}: a {type(optimizer).__qualname__} is held by its engine; give wrap the engine alone "
            "(engine=...)"
        ]
    )


def _refuse_loader(name: str, loader: Any) -> Any:
    raise ConfigError(
        [
            f"{name}: a DeepSpeedDataLoader cannot say which batch comes next; leave training_data out of "
            "initialize and use torchdata.stateful_dataloader.StatefulDataLoader, or data with state_dict "
            "and load_state_dict"
        ]
    )


check_version(_deepspeed.__version__)
switch_off_shared_memory()
register_adapter(DeepSpeedEngine, EngineAdapter)
register_adapter(DeepSpeedOptimizer, _refuse_optimizer)
register_adapter(DeepSpeedDataLoader, _refuse_loader)
register_forgetter(forget_process)
