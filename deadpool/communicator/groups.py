"""Communicators: every handle of this process, from `init_process_group` to the end, through all generations.

A handle is what a framework's ProcessGroup holds. `open(generation, store)` gives every handle a new
inner communicator, `close(generation)` takes it away; in between its collectives run as if DeadPool were
not there. The native part (csrc/) closes handles when the agent says so, even while Python is busy.

Life of a process:
    active from the start: install, start_recording, init_process_group(store), build, finish_recording
    promoted spare:        install, start_replay, init_process_group(None), build, finish_replay, open
    throw-away build:      as a promoted spare, then destroy_all; another Communicators follows
"""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store

from deadpool.communicator.default_store import DefaultStore
from deadpool.communicator.extension import MISSING, SwapBackend, native
from deadpool.communicator.object_calls import pickle_objects
from deadpool.communicator.rebuild import HandlesBuilder
from deadpool.communicator.record import describe
from deadpool.communicator.recorder import Recorder
from deadpool.communicator.replayer import Replayer
from deadpool.communicator.torch_patches import TorchPatches
from deadpool.errors import CollectiveAborted, CommunicatorError, IntegrationError

logger = logging.getLogger(__name__)

T = TypeVar("T")

REBUILD_S = 30.0
"""Deadline of a rebuild when the store brings none (DESIGN section 7)."""

_JOIN_S = 10.0

_MOST_NAMED_PEERS = 64  # sends go to neighbours in a pipeline; naming all pairs of a large world helps nobody

CallHook = Callable[[str, str, int], None]
"""hook(handle name, operation, number of calls before this one since it was set)."""

_COLLECTIVE_TEXT = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|socket timeout|wait timeout|timed out waiting"
    r"|application timeout caused pair closure|read error|writev|CollectiveAborted",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandleStatus:
    """One handle, for `deadpool status`."""

    name: str
    kind: str  # gloo or nccl
    rank: int  # within the group
    size: int
    generation: int  # of its inner communicator; 0 before the first
    issued: int
    completed: int


@dataclass(frozen=True, slots=True)
class _SettledGroups:
    """The process groups of the constructor phase, and the counters from which torch and we name groups."""

    groups: set[dist.ProcessGroup]
    group_count: int
    adopted: int
    later_allowed: bool


class Communicators:
    """All handles of one rank.

    One object at a time per process. The close listener, the worker page and the generation that was
    closed last belong to the process: they outlive the object, so that a parked spare hears its agent
    between two builds.

    Args:
        job_id: first part of every store prefix.
        rank: logical rank.
        world_size: number of logical ranks.
        timeout_s: timeout of collectives, unless a group brings its own, and of building a new group.
        close_fd: this worker's end of the close channel; negative: none, only Python closes.
        page_fd: the worker page; negative: counters stay private.
    """

    def __init__(
        self,
        job_id: str,
        rank: int,
        world_size: int,
        timeout_s: float,
        close_fd: int = -1,
        page_fd: int = -1,
    ) -> None:
        self.job_id = job_id
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._patches = TorchPatches(self)
        self._default_store = DefaultStore(self)  # kept: C++ calls methods of the Python object
        self._store: Store | None = None
        self._lock = threading.Lock()
        self._hook: CallHook | None = None
        self._hook_calls = 0
        self._recorder: Recorder | None = None
        self._replayer: Replayer | None = None
        self._served: dict[str, deque[list[torch.Tensor]]] = {}
        self._reapers: list[threading.Thread] = []
        self._adopted = 0
        self._settled: _SettledGroups | None = None
        native.map_page(page_fd)
        native.start_listener(close_fd)

    # ---- life ----

    def install(self) -> None:
        """Serve every group that is made from now on by a handle. Call before anything imports frameworks."""
        self._patches.install()

    def uninstall(self) -> None:
        """Restore torch. Groups that exist keep their handles."""
        self._patches.remove()

    def init_process_group(self, store: Store | None) -> None:
        """Make the default process group; builds its communicator unless a record is being replayed.

        Args:
            store: rendezvous of the generation that its `generation` attribute names; None while replaying.
        """
        if store is not None:
            self._enter(getattr(store, "generation", max(1, self.closed_generation + 1)), store)
        has_device = torch.cuda.is_available()
        if has_device and MISSING:
            raise IntegrationError(
                f"training on a GPU needs the C++ extension of DeadPool, which is missing ({MISSING}): "
                "install a C++ compiler and install DeadPool again with --no-build-isolation"
            )
        backend = "cpu:gloo,cuda:nccl" if has_device else "gloo"
        dist.init_process_group(
            backend,
            store=self._default_store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=self.timeout_s),
        )

    def destroy_all(self) -> None:
        """Forget every handle and process group; another Communicators may follow in this process."""
        if dist.is_initialized():
            dist.destroy_process_group()
        native.close(max(self.generation, self.closed_generation))
        self._patches.remove()
        if self._recorder is not None:
            self._recorder.close()
        self._recorder = self._replayer = self._hook = self._settled = None
        self._served.clear()
        self._leave_store()
        native.free_nccl()
        self.reap()
        native.clear_entries()
        native.reset_generations()

    def shutdown(self) -> None:
        """End the listener and join this object's threads; for a process that goes on without DeadPool."""
        self._patches.remove()
        self._leave_store()
        for reaper in self._reapers:
            reaper.join(_JOIN_S)
        native.stop_listener()

    # ---- generations ----

    @property
    def generation(self) -> int:
        """Generation under which handles are, or are being, built; 0 before the first."""
        return native.opened_generation()

    @property
    def closed_generation(self) -> int:
        """Newest generation that was closed; 0 before the first close."""
        return native.closed_generation()

    def is_closed(self) -> bool:
        """The current generation was closed (or none was opened): collectives raise CollectiveAborted."""
        return native.is_closed()

    def frozen(self) -> bool:
        """No capture that completes now may be reported. Becomes true before any communicator is aborted."""
        return native.is_closed()

    def open(self, generation: int, store: Store, *, timeout_s: float | None = None) -> None:
        """Give every handle a new inner communicator, in order of creation, as a collective act of all ranks.

        Whatever an older generation left open is closed first.

        Args:
            generation: newer than every closed one.
            store: rendezvous of that generation; belongs to this object from now on.
            timeout_s: deadline of the whole; defaults to the store's own, or 30 s.

        Raises:
            RebuildTimeout: some peers did not come, or connecting failed; the message names them.
            CollectiveAborted: closed meanwhile.
        """
        native.close(generation - 1)
        native.free_nccl()  # every rank has closed by now: whoever opens was told so
        self._forget_later_groups()
        self._enter(generation, store)
        limit_s: float = getattr(store, "timeout_s", REBUILD_S) if timeout_s is None else timeout_s
        self._builder().build_all(native.handles(), limit_s)

    def close(self, generation: int) -> None:
        """Close every handle of generations up to `generation`, the way the native listener does.

        On return new collectives raise, `frozen()` is true, those in flight have failed or are about to.
        """
        native.close(generation)

    def reap(self) -> None:
        """Release the communicators of closed generations, on a thread: it may take up to a second."""
        self._reapers = [reaper for reaper in self._reapers if reaper.is_alive()]
        reaper = threading.Thread(target=native.reap, name="deadpool-reaper", daemon=True)
        reaper.start()
        self._reapers.append(reaper)

    # ---- the constructor phase ----

    def start_recording(self) -> None:
        """Keep what collectives return from now on, and the random generators as they are now."""
        self._recorder = Recorder(self.rank, self.world_size)
        self._refresh_taps()

    def finish_recording(self) -> bytes:
        """End of the constructor phase: the record, and from now on no Python in a collective."""
        assert self._recorder is not None
        record = self._recorder.finish()
        self._recorder = None
        self._refresh_taps()
        return record

    def start_replay(self, record: bytes) -> None:
        """Answer all collectives from `record` until finish_replay; sets the random generators.

        Raises:
            ReplayMismatch: the record is of another rank or cannot be read.
        """
        self._replayer = Replayer(record, self.rank, self.world_size)
        self._refresh_taps()

    def finish_replay(self, protected: Iterable[torch.Tensor]) -> None:
        """End of the replayed constructor phase; handles have no communicators until `open`.

        Args:
            protected: every tensor that the restore will write.

        Raises:
            ReplayMismatch: names what differs from the record.
        """
        assert self._replayer is not None
        replayer, self._replayer = self._replayer, None
        self._refresh_taps()
        replayer.finish(protected)

    def settle_groups(self, *, later_allowed: bool) -> None:
        """The groups that exist now last as long as the job. A spare has them too, and no others.

        Args:
            later_allowed: groups may still be made; they end when the next generation opens, since a spare
                that takes over has none of them: whoever made them is entered again and makes them again.
        """
        world = distributed._world
        self._settled = _SettledGroups(set(world.pg_map), world.group_count, self._adopted, later_allowed)

    def serve_next(
        self, group: dist.ProcessGroup, results: Sequence[torch.Tensor | Sequence[torch.Tensor]]
    ) -> None:
        """Let the next collectives of `group` return `results`, one each, without peers."""
        served = [[result] if isinstance(result, torch.Tensor) else list(result) for result in results]
        self._served.setdefault(str(group.group_name), deque()).extend(served)
        self._refresh_taps()

    # ---- looking in ----

    def handles(self) -> list[HandleStatus]:
        """All handles in order of creation."""
        return [
            HandleStatus(
                name=handle.handle_name,
                kind=handle.kind,
                rank=handle.rank(),
                size=handle.size(),
                generation=handle.generation,
                issued=handle.issued,
                completed=handle.completed,
            )
            for handle in native.handles()
        ]

    def describe_groups(self) -> dict[str, str]:
        """Name of each handle -> words for people: the framework's own, and the global ranks.

        Also of the lines on which this rank sends and receives, in groups that are not too large.
        """
        texts = {}
        for group in distributed._world.pg_map:
            ranks = dist.get_process_group_ranks(group)
            listed = ",".join(map(str, ranks))
            text = f"{group.group_name} ({group.group_desc}, ranks {listed})"
            texts[str(group.group_name)] = text
            me, peers = group.rank(), range(len(ranks) if len(ranks) <= _MOST_NAMED_PEERS else 0)
            for sender, receiver in [(me, peer) for peer in peers] + [(peer, me) for peer in peers]:
                line = f"{group.group_name}/{sender}>{receiver}"
                texts[line] = f"{text}, from rank {ranks[sender]} to rank {ranks[receiver]}"
        return texts

    def before_call(self, hook: CallHook | None) -> None:
        """Call `hook` before each collective while set; what it raises reaches the caller."""
        self._hook = hook
        self._hook_calls = 0
        self._refresh_taps()

    @staticmethod
    def failed_collective(error: BaseException) -> bool:
        """Whether `error`, or what it was raised from, came from a collective, as far as one can tell."""
        seen: set[int] = set()
        current: BaseException | None = error
        while current is not None and id(current) not in seen:
            seen.add(id(current))
            if isinstance(current, (CollectiveAborted, dist.DistError)):
                return True
            if isinstance(current, RuntimeError) and _COLLECTIVE_TEXT.search(str(current)):
                return True
            current = current.__cause__ or current.__context__
        return False

    # ---- called by the patches ----

    def make_handle(self, kind: str, rank: int, size: int, options: c10d.Backend.Options) -> SwapBackend:
        return SwapBackend(rank, size, kind, options)

    def adopt(self, handle: SwapBackend) -> None:
        if handle.handle_name != "unnamed":
            return
        if self._settled is not None and not self._settled.later_allowed:
            handle.shutdown()
            raise IntegrationError(
                "a process group is made after the first call of a step protected by wrap_step: a spare that "
                "takes over could not make it again; make all groups before"
            )
        handle.set_name(self._name_of(handle))
        for phase in (self._recorder, self._replayer):
            if phase is not None:
                phase.add_group(handle.handle_name, handle.rank(), handle.size())
        if self._needs_tap():
            handle.set_tap(self._tap)
        if self._store is not None:
            try:
                self._builder().build_one(handle, self._members(handle), self.timeout_s)
            except BaseException:
                handle.shutdown()  # its group never came to be: no later generation builds it
                raise

    def object_broadcast(self, group: str, objects: list[Any], run: Callable[[], None]) -> None:
        if self._replayer is not None:
            objects[:] = self._replayer.on_object_broadcast(group)
        elif self._recorder is not None:
            self._recorder.on_object_broadcast(group, lambda: _run_and_pickle(run, objects))
        else:
            run()

    # ---- called by the default store ----

    def current_store(self) -> Store | None:
        return None if self.is_closed() else self._store

    def user_call(self, method: str, key: str, call: Callable[[], T]) -> T:
        if self._replayer is not None:
            return self._replayer.on_store(method, key, call)
        if self._recorder is not None:
            return self._recorder.on_store(method, key, call)
        return call()

    # ---- inside ----

    def _enter(self, generation: int, store: Store) -> None:
        native.open(generation)
        self._leave_store()
        self._store = store

    def _forget_later_groups(self) -> None:
        """Destroy the groups that were made since `settle_groups`, and name new ones as a spare will."""
        settled = self._settled
        if settled is None:
            return
        for group in [group for group in distributed._world.pg_map if group not in settled.groups]:
            dist.destroy_process_group(group)
        distributed._world.group_count = settled.group_count
        self._adopted = settled.adopted

    def _leave_store(self) -> None:
        store, self._store = self._store, None
        close = getattr(store, "close", None)
        if close is not None:
            close()

    def _builder(self) -> HandlesBuilder:
        assert self._store is not None
        return HandlesBuilder(
            store=self._store,
            prefix=f"/{self.job_id}/{self.generation}",
            generation=self.generation,
            rank=self.rank,
            world_size=self.world_size,
        )

    def _name_of(self, handle: SwapBackend) -> str:
        """Name of the group, the same on all its members; a second handle of a group adds its kind."""
        group = str(getattr(handle.options, "group_name", "")) or f"group-{self._adopted}"
        self._adopted += 1
        taken = {other.handle_name for other in native.handles()}
        return f"{group}.{handle.kind}" if group in taken else group

    def _members(self, handle: SwapBackend) -> Sequence[int]:
        return list(handle.options.global_ranks_in_group) or range(self.world_size)

    def _needs_tap(self) -> bool:
        return bool(self._hook or self._recorder or self._replayer or self._served)

    def _refresh_taps(self) -> None:
        tap = self._tap if self._needs_tap() else None
        for handle in native.handles():
            handle.set_tap(tap)

    def _tap(
        self,
        handle_name: str,
        op: str,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        root: int,
        issue: Callable[[], c10d.Work | None],
    ) -> c10d.Work | None:
        hook = self._hook
        if hook is not None:
            with self._lock:
                index = self._hook_calls
                self._hook_calls += 1
            hook(handle_name, op, index)
        if handle_name in self._served:
            return self._serve(handle_name, op, outputs)
        if self._replayer is not None:
            return self._replayer.on_call(handle_name, op, outputs, inputs, root, issue)
        if self._recorder is not None:
            return self._recorder.on_call(handle_name, op, outputs, inputs, root, issue)
        return issue()

    def _serve(self, handle_name: str, op: str, outputs: list[torch.Tensor]) -> c10d.Work:
        results = self._served[handle_name].popleft()
        if not self._served[handle_name]:
            del self._served[handle_name]
            self._refresh_taps()
        if [tensor.numel() for tensor in outputs] != [result.numel() for result in results]:
            raise CommunicatorError(
                f"group '{handle_name}': {op} {describe(outputs)} was to be served with {describe(results)}"
            )
        for output, result in zip(outputs, results, strict=True):
            output.detach().copy_(result.reshape(output.shape))
        return native.done_work(outputs)


def _run_and_pickle(run: Callable[[], None], objects: list[Any]) -> bytes:
    run()
    return pickle_objects(objects)
