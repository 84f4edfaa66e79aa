"""The rig of the Slurm tests: our own Slurm, the template filled in as by a user, a run to compare with."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from deadpool.cli.compare import compare_runs
from deadpool.cli.rundir import read_digests, read_workers
from deadpool.cli.slurm.job import submission_name
from deadpool.cli.slurm.template import job_template
from deadpool.testing.cluster import Event, Job, JobSpec, run_to_end
from tests import namespaces
from tests.slurm.cluster import Cluster, wait_until, why_not

TOY = Path(__file__).parents[1] / "scenarios" / "toy.py"
ACTIVE = 3
GONE_S = 15.0  # after the end, the job has left the queue
TIMEOUT_S = 300
FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == FOLDER and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


class Submitted:
    """A job in the queue, and what it leaves in its folder; `restart`: how often Slurm has requeued it."""

    def __init__(self, cluster: Cluster, folder: Path, slurm_id: str, restart: int = 0) -> None:
        self.cluster = cluster
        self.slurm_id = slurm_id
        self._folder = folder
        self._restart = restart

    @property
    def run_dir(self) -> Path:
        return next(self._folder.glob(f"deadpool-runs/*/{self._name}"))

    @property
    def records_dir(self) -> Path:
        return self._folder / f"records-{self.slurm_id}.{self._restart}"

    @property
    def _name(self) -> str:
        return submission_name(self.slurm_id, str(self._restart))

    def events(self) -> list[Event]:
        paths = self._folder.glob(f"deadpool-runs/*/{self._name}/events-*.jsonl")
        found = [
            json.loads(line)
            for path in paths
            for line in path.read_text().splitlines(True)
            if line[-1] == "\n"
        ]
        return sorted(found, key=lambda event: float(event["monotonic_s"]))

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events() if event["event"] == name]

    def wait_for(self, name: str, limit_s: float = 120.0, **fields: Any) -> Event:
        """Wait for an event; a field that is a function must hold, another must be equal."""

        def look() -> Event | None:
            is_queued = self.cluster.is_in_queue(self.slurm_id)  # first: it may end between the two looks
            for event in self.named(name):
                if all(
                    want(event.get(key)) if callable(want) else event.get(key) == want
                    for key, want in fields.items()
                ):
                    return event
            if not is_queued:
                raise AssertionError(f"no {name}, and the job has ended:\n{self.output}")
            return None

        try:
            found = wait_until(look, name, limit_s)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.output}") from error
        assert found is not None
        return found

    def wait_until_registered(self, hosts: int) -> None:
        """Wait until so many hosts have come to the job, spares included."""

        def look() -> bool:
            return len({event["member"] for event in self.named("member.registered")}) == hosts

        try:
            wait_until(look, f"{hosts} hosts", 60.0)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.output}") from error

    def wait_until_gone(self, limit_s: float = 120.0) -> dict[str, str]:
        """Wait until the job has left the queue; returns what Slurm then says of it."""
        self._wait_until_not_queued(limit_s)
        return self.cluster.show(self.slurm_id)

    def check_gone_soon_after(self, phase: str) -> dict[str, str]:
        """The job ends in this phase and leaves the queue within GONE_S; returns what Slurm then says.

        The end is that of the first host, not the last View: scripts may go on for a while after `wrap`.
        """
        self.wait_for("view.published", phase=phase)
        self._wait_until_not_queued()
        gone_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        seconds = gone_s - float(self.named("run.finished")[0]["monotonic_s"])
        assert seconds <= GONE_S, f"{seconds:.1f} s after the end\n{self.output}"
        return self.cluster.show(self.slurm_id)

    def _wait_until_not_queued(self, limit_s: float = 120.0) -> None:
        try:
            wait_until(lambda: not self.cluster.is_in_queue(self.slurm_id), "end of the job", limit_s)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.output}") from error

    def node_of(self, rank: int) -> str:
        """Node on which a rank runs now."""
        members = [line.member for line in read_workers(self.run_dir) if line.rank == rank]
        return members[-1].rpartition("-")[0]

    def result(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / "result.json").read_text()))

    @property
    def output(self) -> str:
        paths = [*self._folder.glob("*.out"), *self._folder.glob("deadpool-runs/*/*/*.log")]
        return "\n".join(f"---- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)


class Rig:
    """Fills in the template and submits it, and compares with runs that nothing disturbed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._undisturbed: dict[tuple[str, ...], Job] = {}

    def write_script(
        self,
        folder: Path,
        args: tuple[str, ...],
        *,
        spares: int = 1,
        options: tuple[str, ...] = (),
        active: int = ACTIVE,
        sbatch: tuple[str, ...] = (),
        setup: str = "",
    ) -> Path:
        """The template as a user would fill it in."""
        text = job_template()
        directives = "".join(
            f"#SBATCH {line}\n" for line in (f"--nodes={active + spares}", "--time=10", *sbatch)
        )
        text = re.sub(r"#SBATCH --nodes=.*\n", "", text)
        text = re.sub(r"#SBATCH --time=.*\n", directives, text)
        text = text.replace("SPARES=1\n", f"SPARES={spares}\n")
        records = '"records-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"'
        given = ("--lease-ttl-s", "3", "--record-dir", records, *options)
        text = re.sub(r"OPTIONS=\(\n.*?\n\)\n", f"OPTIONS=({' '.join(given)})\n", text, flags=re.DOTALL)
        train = " ".join([str(TOY), *args])
        text = re.sub(r"TRAIN=\(\n.*?\n\)\n", f"TRAIN=({train})\n", text, flags=re.DOTALL)
        text = text.replace("# source venv/bin/activate\n", f"{setup}\n")
        path = folder / "job.sbatch"
        path.write_text(text)
        return path

    def submit(self, cluster: Cluster, folder: Path, args: tuple[str, ...], **keywords: Any) -> Submitted:
        script = self.write_script(folder, args, **keywords)
        return Submitted(cluster, folder, cluster.submit(script))

    def undisturbed(self, args: tuple[str, ...], active: int = ACTIVE) -> Job:
        key = (str(active), *args)
        if key not in self._undisturbed:
            spec = JobSpec(
                script=TOY,
                args=args,
                options=("--nnodes", str(active)),
                run_dir=self._folder / f"undisturbed-{len(self._undisturbed)}",
            )
            job, code = run_to_end(spec)
            assert code == 0, job.output[-4000:]
            self._undisturbed[key] = job
        return self._undisturbed[key]

    def check_identical(self, job: Submitted, args: tuple[str, ...], active: int = ACTIVE) -> None:
        """Every recorded value and the final state equal the undisturbed run's, bit for bit."""
        link = job.run_dir / "records"
        if not link.exists():
            link.symlink_to(job.records_dir)
        found = compare_runs(self.undisturbed(args, active).run_dir, job.run_dir, active)
        assert found.has_records
        assert not found.differences, found.differences[:5]

    def check_final_state(self, job: Submitted, args: tuple[str, ...], active: int = ACTIVE) -> None:
        """Every tensor and every part of the small state is as undisturbed, bit for bit."""
        undisturbed = read_digests(self.undisturbed(args, active).run_dir)
        found = read_digests(job.run_dir)
        for rank in range(active):
            assert found[rank].final == undisturbed[rank].final
            assert found[rank].blob == undisturbed[rank].blob


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("slurm"))


StartCluster = Callable[..., Cluster]


@pytest.fixture
def start_cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StartCluster]:
    """Starts a Slurm that ends with the test."""
    if reason := why_not():
        pytest.skip(f"{request.node.name}: {reason}")
    with ExitStack() as stack:

        def start(n_nodes: int, **keywords: Any) -> Cluster:
            if keywords.get("is_cuttable") and (reason := namespaces.why_not()):
                pytest.skip(f"{request.node.name}: {reason}")
            return stack.enter_context(Cluster(tmp_path / "slurm", n_nodes, **keywords))

        yield start
