"""`wrap_step`: protects a loop that is not ours. The unit is one call of the step function.

After a failure the runner itself repeats the steps since the rollback step, from the inputs that it kept,
so the caller sees one call that took longer. A promoted spare enters the caller's loop at its beginning: its
calls up to the rollback step return None at once, because those steps were already done under its rank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

from deadpool.errors import ConfigError, SnapshotError
from deadpool.runtime.session import TrainingSession
from deadpool.runtime.state import StateKeeper
from deadpool.snapshot.rng import read_global_rng, restore_global_rng

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Inputs:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    position: Any  # state of `data` after the batch was taken
    rng: dict[str, Any]  # global generators after the batch was drawn


class StepRunner(Generic[T]):
    """A protected step function; made by `deadpool.wrap_step`.

    Args:
        step: the step function.
        session: of this process, or None when unprotected.
        state: training state.
        data: loader whose batches are the step's first argument, or None.
        draw: makes the step's first argument, for a framework whose steps take several batches; called with
            the function that gives the next batch. None: one batch, as it is, if there is data.
    """

    def __init__(
        self,
        step: Callable[..., T],
        session: TrainingSession | None,
        state: StateKeeper,
        data: Any,
        *,
        draw: Callable[[Callable[[], Any]], Any] | None = None,
    ) -> None:
        if data is not None and not hasattr(data, "__iter__"):
            raise ConfigError([f"data: a {type(data).__name__} cannot be iterated; pass the loader itself"])
        self._step = step
        self._session = session
        self._state = state
        self._data = data
        self._draw = draw
        self._batches: Iterator[Any] | None = None
        self._calls = 0  # steps that the caller has asked for
        self._kept: OrderedDict[int, _Inputs] = OrderedDict()
        self._is_behind = False  # steps are run again from their kept inputs
        self._is_attached = False
        self._is_closed = False

    def __call__(self, *args: Any, **kwargs: Any) -> T | None:
        """Run the next step. None only on a promoted spare, for steps that were done before it came."""
        session = self._session
        if session is None:
            return self._step(*self._batch(), *args, **kwargs)
        if not self._is_attached:
            self._is_attached = True
            session.attach(self._state, is_reentered=False)
        self._calls += 1
        if self._calls <= session.step:
            return None
        self._open_loader()
        self._state.enter_loop()  # on a spare, what building the script and the iterator drew is undone
        self._keep(session, args, kwargs)
        while True:
            try:
                result = self._run_open_steps(session)
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                session.judge(error)
            else:
                return result
            self._recover(session)

    def record(self, **values: torch.Tensor | float) -> None:
        """Keep values of the step that runs, bit for bit. They count only after its end."""
        if self._session is not None:
            self._session.record(values)

    def close(self) -> None:
        """Return when all ranks have finished; until then this rank takes part in recoveries."""
        session = self._session
        if session is None or not self._is_attached or self._is_closed:
            return
        while True:
            try:
                self._run_open_steps(session)
                session.finish_together()
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                session.judge(error)
            else:
                break
            self._recover(session)
        self._is_closed = True
        session.leave()

    def __enter__(self) -> StepRunner[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def _run_open_steps(self, session: TrainingSession) -> T | None:
        result: T | None = None
        while session.step < self._calls:
            step = session.begin_step()
            # While older steps run again the loader stands ahead of them: their position is not the state's.
            self._state.hold = "a step is run again" if step < self._calls else None
            inputs = self._kept[step]
            if self._is_behind:
                restore_global_rng(inputs.rng)  # as it was after this step's batch had been drawn
            result = self._step(*inputs.args, **inputs.kwargs)
            session.end_step()
        self._is_behind = False
        return result

    def _keep(self, session: TrainingSession, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = self._batch()
        position = self._data.state_dict() if self._data is not None else None
        self._kept[self._calls] = _Inputs((*batch, *args), kwargs, position, read_global_rng())
        oldest = self._calls - session.worker.config.run.keep_steps
        while self._kept and next(iter(self._kept)) <= min(oldest, session.worker.committed_step):
            self._kept.popitem(last=False)

    def _open_loader(self) -> None:
        if self._data is not None and self._batches is None:
            self._batches = iter(self._data)

    def _batch(self) -> tuple[Any, ...]:
        """The step's first argument, if it has one."""
        if self._draw is not None:
            return (self._draw(self._next_batch),)
        return () if self._data is None else (self._next_batch(),)

    def _next_batch(self) -> Any:
        self._open_loader()
        assert self._batches is not None
        for _ in range(2):
            try:
                return next(self._batches)
            except StopIteration:
                self._batches = iter(self._data)  # the next epoch
        raise ConfigError([f"data: the {type(self._data).__name__} has no batches"])

    def _recover(self, session: TrainingSession) -> None:
        """Stand at the rollback step with the loader where the newest call has left it."""
        session.recover()
        self._is_behind = True
        missing = [step for step in range(session.step + 1, self._calls + 1) if step not in self._kept]
        if missing:
            raise SnapshotError(
                f"rank {session.rank}: the inputs of steps {missing[0]} to {missing[-1]} are not kept "
                "any more; raise --keep-steps"
            )
        if self._data is not None and self._batches is not None:
            self._data.load_state_dict(self._kept[self._calls].position)
            # Now, not at the next batch: what building an iterator draws is undone as the next step begins.
            self._batches = iter(self._data)
