"""The rig of the acceptance scenarios: jobs of four hosts on this machine, and the three checks.

Terms and bounds of the scenario catalogue: lease TTL 3 s, collective timeout 120 s (so that a recovery can
only come from membership), DETECT = TTL + 2 s, RECOVER = DETECT + 10 s.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from deadpool.cli.compare import compare_runs
from deadpool.liveness.stat import is_running, state_of
from deadpool.membership.embedded import EmbeddedEtcd
from deadpool.testing.cluster import Event, HostsJob, Job, JobSpec, RunFolder, run_to_end, running

TOY = Path(__file__).parent / "toy.py"
TTL_S = 3.0
DETECT_S = TTL_S + 2.0
RECOVER_S = DETECT_S + 10.0
TIMEOUT_S = 300
OPTIONS = ("--lease-ttl-s", str(TTL_S), "--collective-timeout-s", "120")

Launch = Callable[..., Job]
ByHand = Callable[..., HostsJob]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A scenario starts a dozen processes that each load torch, twice; a loaded machine needs its time."""
    for item in items:
        if item.path.parent == TOY.parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


class Rig:
    """Runs jobs, and compares disturbed ones with undisturbed ones of the same arguments.

    Undisturbed runs are shared by all tests of a session.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._undisturbed: dict[tuple[str, ...], Job] = {}
        self._count = 0

    def spec(
        self,
        args: Sequence[str],
        *,
        nnodes: int = 4,
        spares: int = 1,
        options: Sequence[str] = (),
        limit_s: float = 120.0,
    ) -> JobSpec:
        self._count += 1
        return JobSpec(
            script=TOY,
            args=args,
            options=("--nnodes", str(nnodes), "--spares", str(spares), *OPTIONS, *options),
            run_dir=self._folder / f"run-{self._count}",
            limit_s=limit_s,
        )

    def undisturbed(self, args: Sequence[str], nnodes: int = 4) -> Job:
        key = (str(nnodes), *args)
        if key not in self._undisturbed:
            job, code = run_to_end(self.spec(args, nnodes=nnodes, spares=0))
            assert code == 0, job.output[-4000:]
            self._undisturbed[key] = job
        return self._undisturbed[key]

    def check_trace(self, job: RunFolder, args: Sequence[str] = (), world_size: int = 4) -> None:
        """TC: every recorded value and the final state equal the undisturbed run's, bit for bit."""
        comparison = compare_runs(self.undisturbed(args, world_size).run_dir, job.run_dir, world_size)
        assert comparison.has_records
        assert not comparison.differences, comparison.differences[:5]

    def check_one_owner(self, job: RunFolder, world_size: int = 4) -> None:
        """OO: one process completes the steps of a (rank, generation); generations only grow."""
        first_of: dict[int, float] = {}
        last_of: dict[int, float] = {}
        for rank in range(world_size):
            owners: dict[int, set[int]] = defaultdict(set)
            newest = 0
            for record in job.records(rank):
                generation, moment = int(record["g"]), float(record["t"])
                assert generation >= newest, f"rank {rank} recorded in generation {generation} after {newest}"
                newest = generation
                owners[generation].add(int(record["p"]))
                first_of[generation] = min(moment, first_of.get(generation, moment))
                last_of[generation] = max(moment, last_of.get(generation, moment))
            for generation, pids in owners.items():
                assert len(pids) == 1, f"rank {rank}, generation {generation}: steps of processes {pids}"
        for older in last_of:
            for newer in first_of:
                if older < newer:
                    assert last_of[older] <= first_of[newer] + 1.0

    def check_survivors(self, job: RunFolder, replaced: set[int], world_size: int = 4) -> None:
        """SC: ranks whose host was not struck finished in the process in which they began."""
        for rank in range(world_size):
            pids = [line["pid"] for line in job.workers() if line["rank"] == rank]
            if rank in replaced:
                assert len(set(pids)) > 1, f"rank {rank} was struck and kept its process"
            else:
                assert set(pids) == {job.digests(rank)["pid"]}, f"rank {rank} changed its process"

    def check_recovery(self, job: RunFolder, struck_s: float, within_s: float = RECOVER_S) -> Event:
        """A recovery followed within the bound, up to the first new step; returns its `recovery.done`."""
        assert job.named("snapshot.committed"), "nothing was ever protected"
        taken = [event for event in job.named("snapshot.refused") if "no complete copy" in event["reason"]]
        assert not taken, f"a bank was overwritten while it was to be sent: {taken[0]}"
        done = next(event for event in job.named("recovery.done") if event["monotonic_s"] > struck_s)
        steps = [
            float(record["t"])
            for record in job.records(0)
            if int(record["g"]) >= done["generation"] and float(record["t"]) > struck_s
        ]
        assert min(steps) - struck_s <= within_s
        return done

    def check_nothing_safe_lost(self, job: RunFolder, done: Event, struck_s: float) -> None:
        """A recovery went back no further than to the newest step that was protected at the strike.

        How many steps that costs is up to the machine: one that it names too late is not protected.
        """
        commits = [each for each in job.named("snapshot.committed") if each["monotonic_s"] < struck_s]
        assert commits, "nothing was protected when the host was struck"
        assert done["rollback_step"] >= max(each["step"] for each in commits)


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("scenarios"))


@pytest.fixture
def launch(rig: Rig) -> Iterator[Launch]:
    """Starts a job that ends with the test at the latest."""
    contexts = []

    def start(args: Sequence[str] = (), **keywords: object) -> Job:
        context = running(rig.spec(args, **keywords))  # type: ignore[arg-type]
        contexts.append(context)
        return context.__enter__()

    yield start
    for context in contexts:
        context.__exit__(None, None, None)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EmbeddedEtcd]:
    """A server that a test may stop, kill and start again."""
    with EmbeddedEtcd(tmp_path / "etcd") as server:
        yield server


@pytest.fixture
def by_hand(rig: Rig) -> Iterator[ByHand]:
    """Prepares a job whose hosts a test starts one by one; what runs then ends with the test."""
    jobs: list[HostsJob] = []

    def prepare(
        etcd: Sequence[str], args: Sequence[str] = (), *, job_id: str = "by-hand", **keywords: object
    ) -> HostsJob:
        jobs.append(HostsJob(rig.spec(args, **keywords), etcd, job_id))  # type: ignore[arg-type]
        return jobs[-1]

    yield prepare
    for job in jobs:
        job.close()


def wait_until_gone(pid: int, within_s: float) -> None:
    """Gone, or ended and still to be reaped by whoever is its parent now."""
    deadline_s = time.monotonic() + within_s
    while True:
        if not is_running(pid):
            return
        assert time.monotonic() < deadline_s, (
            f"process {pid} (state {state_of(pid)}) lives after {within_s:g} s"
        )
        time.sleep(0.02)
