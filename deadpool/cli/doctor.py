"""`deadpool doctor --slurm`: looks at a running allocation and says what to change.

Facts are gathered first, each with a deadline and all at once where they come from other hosts; what follows
from them is decided by `examine`, which is pure.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from deadpool.cli.slurm import tools
from deadpool.cli.slurm.job import own_command_id, read_job
from deadpool.cli.slurm.script import Warned, find_fault, options_of, warning_of
from deadpool.config import Config
from deadpool.core.types import Phase
from deadpool.errors import ConfigError, ExitCode, StoreUnavailable
from deadpool.membership.etcd import EtcdStore
from deadpool.membership.registry import Registry
from deadpool.runtime.endpoints import etcd_config

SLURM_LIMIT_S = 8.0  # for all that Slurm is asked, so that the command answers within 10 s
LEAST_LIMIT_S = 0.5
DIAL_LIMIT_S = 1.0
DIALS_AT_ONCE = 64

Answer: TypeAlias = str | tools.SlurmFailed
"""What Slurm says, or why it cannot be seen: slurmctld takes up to 100 s on large sites."""

_MARKS = {True: "ok    ", False: "change", None: "unseen"}
_STOPPED = (Phase.STALLED, Phase.HALTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one check."""

    subject: str
    is_good: bool | None  # None: could not be seen
    text: str  # what was seen, and what to change if it is not good


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was seen of an allocation and of the job in it. None: could not be seen."""

    job: Mapping[str, str]  # as scontrol shows it
    script: Answer = ""  # the batch script
    scheduler: Answer = ""  # SchedulerParameters
    folders: tuple[Path, ...] = ()  # where the run folder was looked for, below deadpool-runs
    warning_signal: str | None = None  # what the hosts expect ahead of the time limit
    config: Config | None = None  # of the job, once `prepare` has run
    etcd_version: str | None = None
    etcd_problem: str = ""
    etcd_silent: tuple[str, ...] = ()  # endpoints of members that accept no connections
    phase: Phase | None = None  # None: the job has not registered, or could not be asked
    reason: str = ""  # of the phase, in the View
    spares_left: int | None = None  # None: the job does not run, or could not be asked
    unreachable: tuple[str, ...] = ()  # host:port of agents that do not accept connections from here
    asked: int = 0  # ports of agents that were dialled
    own_address: str = ""  # what the host name resolves to here
    interfaces: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def doctor_command(
    run: Path | None, slurm_id: str | None, environment: Mapping[str, str] = os.environ
) -> int:
    """Print the findings; returns 0 if there is nothing to change, else 2.

    Args:
        run: folder that `deadpool slurm prepare` printed; None: looked for below the current folder and
            that of the job.
        slurm_id: Slurm's job id, `<array id>_<task>` for a task of an array; None: that of `run`, else of
            the allocation we are in.
        environment: of this process.

    Raises:
        ConfigError: no job is named, and this is none.
    """
    if slurm_id is None and run is not None:
        slurm_id = read_job(run).command_id
    slurm_id = slurm_id or own_command_id(environment)
    if slurm_id is None:
        raise ConfigError(["call it inside an allocation, or name the job: --job ID"])
    findings = examine(gather(run, slurm_id, environment))
    for finding in findings:
        print(f"{_MARKS[finding.is_good]}  {finding.subject}: {finding.text}")
    return int(ExitCode.BAD_INPUT) if any(finding.is_good is False for finding in findings) else 0


def gather(run: Path | None, slurm_id: str, environment: Mapping[str, str]) -> Facts:
    """Look at everything; what cannot be seen is left out, except the job itself.

    Raises:
        ConfigError: slurmctld does not tell of this job, the id is that of a whole array, or `run` is not
            what `prepare` printed.
    """
    deadline_s = time.monotonic() + SLURM_LIMIT_S
    with ThreadPoolExecutor() as pool:
        scheduler = pool.submit(_scheduler_parameters, deadline_s)
        shown = _ask(deadline_s, "scontrol", "show", "job", "--oneliner", slurm_id)
        if isinstance(shown, tools.SlurmFailed):
            has_ended = run is not None and (run / "result.json").exists()
            told = f"; it ended: see {run}/result.json" if has_ended else ""
            raise ConfigError([f"nothing to look at: {shown}{told}"]) from shown
        if len(shown.strip().splitlines()) > 1:
            problem = f"job {slurm_id} is an array: name one of its tasks, as in --job {slurm_id}_1"
            raise ConfigError([problem])
        job = tools.fields_of(shown)
        script = pool.submit(_ask, deadline_s, "scontrol", "write", "batch_script", job["JobId"], "-")
        folders = tuple(dict.fromkeys([Path.cwd(), Path(job.get("WorkDir", Path.cwd()))]))
        run = run or find_run(folders, job["JobId"])
        written = None if run is None else read_job(run)
        config = None if written is None else written.decode_config()
        seen = _Cluster(config)
    return Facts(
        job=job,
        script=script.result(),
        scheduler=scheduler.result(),
        folders=folders,
        warning_signal=None if written is None else written.warning_signal,
        config=config,
        etcd_version=seen.etcd_version,
        etcd_problem=seen.problem,
        etcd_silent=seen.silent_members,
        phase=seen.phase,
        reason=seen.reason,
        spares_left=seen.spares_left,
        unreachable=seen.unreachable,
        asked=seen.asked,
        own_address=_own_address(),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        environment=environment,
    )


def find_run(folders: Iterable[Path], slurm_id: str) -> Path | None:
    """Run folder of the newest submission of a job, also if Slurm has requeued it; None if there is none."""
    found: dict[int, Path] = {}
    for folder in folders:
        for path in folder.glob(f"deadpool-runs/*/slurm-{slurm_id}*/slurm.json"):
            name = re.fullmatch(rf"slurm-{slurm_id}(?:\.(\d+))?", path.parent.name)
            if name is not None:
                found[int(name[1] or 0)] = path.parent
    return found[max(found)] if found else None


def examine(facts: Facts) -> list[Finding]:
    """What the facts mean."""
    state = facts.job.get("JobState", "RUNNING")
    if state not in ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED"):
        text = f"{state}: the job has ended, or is ending; `result.json` in its run folder tells how"
        return [Finding(subject="job", is_good=False, text=text)]
    return [
        *_examine_run(facts),
        *_examine_allocation(facts),
        *_examine_phase(facts),
        *_examine_spares(facts),
        *_examine_network(facts),
        *_examine_etcd(facts),
    ]


def _check(subject: str, is_good: bool, good: str, bad: str) -> Finding:
    return Finding(subject=subject, is_good=is_good, text=good if is_good else bad)


def _unseen(subject: str, text: str) -> Finding:
    return Finding(subject=subject, is_good=None, text=text)


def _examine_run(facts: Facts) -> Iterable[Finding]:
    if facts.config is None and facts.job.get("JobState") == "PENDING":
        yield _check(
            "run folder", True, "the job has not started: only what Slurm knows of it is looked at", ""
        )
    elif facts.config is None:
        looked = " or ".join(str(folder / "deadpool-runs") for folder in facts.folders)
        yield _check(
            "run folder",
            False,
            "",
            f"none of this job below {looked}, so spares, ports and etcd are not looked at: give the folder "
            "that `deadpool slurm prepare` printed; the nodes' logs are in it",
        )


def _examine_allocation(facts: Facts) -> Iterable[Finding]:
    if isinstance(facts.script, tools.SlurmFailed) or not facts.script:
        why = facts.script or "Slurm shows none"
        yield _unseen("no-kill, signal", f"make sure that the batch script has both: {why}")
    else:
        options = options_of(facts.script)
        yield _check(
            "no-kill",
            re.search(r"(^|\s)(--no-kill|-k)(\s|$)", options) is not None,
            "a dead node does not end the job",
            "the first dead node ends the whole job: add `#SBATCH --no-kill`, unless sbatch was given it",
        )
        yield _examine_signal(warning_of(facts.script), facts)
    yield _check(
        "requeue",
        facts.job.get("Requeue") == "0",
        "Slurm does not start the job anew by itself",
        "Slurm may start the whole job anew when a node fails: add `#SBATCH --no-requeue`",
    )
    limit = facts.job.get("TimeLimit", "UNLIMITED")
    yield _check(
        "time",
        limit != "UNLIMITED",
        f"limit {limit}",
        "no limit: a job that is stuck stays for ever; add `#SBATCH --time`",
    )


def _examine_signal(warned: Warned | None, facts: Facts) -> Finding:
    if warned is None:
        remedy = "add `#SBATCH --signal=TERM@120`, without `B:`, which would tell the batch script only"
        return _check("signal", False, "", f"the newest step is not saved before the time is up: {remedy}")
    fault = ""
    if facts.config is not None and facts.warning_signal is not None:
        fault = find_fault(warned, facts.warning_signal, facts.config.checkpoint.grace_s)
    seen = f"the agents get {warned.name} {warned.seconds} s before the time is up"
    return _check("signal", not fault, seen, fault)


def _examine_phase(facts: Facts) -> Iterable[Finding]:
    if facts.config is None or facts.phase is None:
        return
    text = f"{facts.phase.value}: {facts.reason}"
    remedy = ""
    if facts.phase is Phase.STALLED:
        wait_s = f"{facts.config.membership.spare_wait_s:g} s (spare_wait_s)"
        remedy = f" Training stands still until a node comes, {wait_s} at most: `deadpool slurm grow`"
    yield _check("phase", facts.phase not in _STOPPED, text, text + remedy)


def _examine_spares(facts: Facts) -> Iterable[Finding]:
    if facts.config is None:
        return
    wanted, left = facts.config.job.spares, facts.spares_left
    grows = bool(facts.config.membership.grow_command)
    if left is not None:
        text = f"{left} of {wanted} left"
        remedy = "the next loss stops the job: `deadpool slurm grow`, or submit it with more spares"
        yield _check("spares", left > 0, text, f"{text}; {remedy}")
    elif facts.etcd_version is None:
        yield _unseen("spares", f"{wanted} asked for; etcd does not tell how many are left")
    elif facts.phase in (None, Phase.FORMING):
        text = f"{wanted} asked for; the job has not formed yet"
        remedy = "the first loss stops the job: submit it with spares, or with --grow"
        yield _check("spares", wanted > 0 or grows, text, f"{text}; {remedy}")
    if not grows:
        return
    if isinstance(facts.scheduler, tools.SlurmFailed):
        yield _unseen("growth", f"--grow needs SchedulerParameters=permit_job_expansion: {facts.scheduler}")
    else:
        yield _check(
            "growth",
            "permit_job_expansion" in facts.scheduler,
            "Slurm lets jobs expand",
            "--grow is on and Slurm lets no job expand: ask for SchedulerParameters=permit_job_expansion",
        )


def _examine_network(facts: Facts) -> Iterable[Finding]:
    if facts.asked:
        yield _check(
            "ports",
            not facts.unreachable,
            f"{facts.asked} ports of agents answer",
            f"no connection from here to {', '.join(facts.unreachable)}: open the ports between the nodes, "
            "or give --address",
        )
    interface = facts.environment.get("GLOO_SOCKET_IFNAME", "")
    if "SLURM_JOB_ID" not in facts.environment:
        text = (
            "seen on a node only: `srun --jobid=JOB --overlap --nodes=1 --ntasks=1 deadpool doctor --slurm`"
        )
        yield _unseen("interface", text)
    elif interface:
        yield _check(
            "interface",
            interface in facts.interfaces,
            f"GLOO_SOCKET_IFNAME={interface}",
            f"GLOO_SOCKET_IFNAME={interface} is no interface of this node: {', '.join(facts.interfaces)}",
        )
    else:
        text = f"this node's name resolves to {facts.own_address or 'nothing'}"
        yield _check(
            "interface",
            bool(facts.own_address) and not facts.own_address.startswith("127."),
            text,
            f"{text}, and gloo tells other nodes to come there: set GLOO_SOCKET_IFNAME to one interface",
        )


def _examine_etcd(facts: Facts) -> Iterable[Finding]:
    if facts.config is None:
        return
    where = ", ".join(facts.config.membership.etcd)
    yield _check(
        "etcd",
        facts.etcd_version is not None and not facts.etcd_problem,
        f"version {facts.etcd_version} at {where}",
        f"{where}: {facts.etcd_problem}"
        + ("; name another program by DEADPOOL_ETCD_BIN" if facts.etcd_version else ""),
    )
    if facts.etcd_silent:
        yield _check(
            "etcd members",
            False,
            "",
            f"{', '.join(facts.etcd_silent)} accept no connection, and nobody takes their place: once half "
            "of the members are gone, the next recovery ends the job with code 5",
        )


class _Cluster:
    """What etcd and the agents say."""

    def __init__(self, config: Config | None) -> None:
        self.etcd_version: str | None = None
        self.problem = ""
        self.phase: Phase | None = None
        self.reason = ""
        self.spares_left: int | None = None
        self.unreachable: tuple[str, ...] = ()
        self.silent_members: tuple[str, ...] = ()
        self.asked = 0
        if config is not None:
            self._ask(config)

    def _ask(self, config: Config) -> None:
        store = EtcdStore(etcd_config(config.membership))
        try:
            store.connect()
            self.etcd_version, self.problem = store.server_version, store.version_warning
            registry = Registry(store, config.job.job_id)
            members = registry.members()
            view, _ = registry.view()
        except StoreUnavailable as error:
            self.problem = str(error)
            return
        finally:
            store.close()
        if view is not None:
            self.phase, self.reason = view.phase, view.reason
            if view.phase in (Phase.RUNNING, Phase.ABORTING, Phase.RESTORING):
                self.spares_left = len([member for member in members if member.id not in view.slots])
        ports = [
            (member.address, port)
            for member in members
            for port in (member.control_port, member.data_port, member.rendezvous_port)
        ]
        self.asked = len(ports)
        self.unreachable = _silent_ones(ports)
        endpoints = (endpoint.rpartition(":") for endpoint in config.membership.etcd)
        self.silent_members = _silent_ones([(host, int(port)) for host, _, port in endpoints])


def _silent_ones(addresses: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    with ThreadPoolExecutor(DIALS_AT_ONCE) as pool:
        answers = pool.map(_answers, addresses)
    return tuple(
        f"{host}:{port}" for (host, port), answer in zip(addresses, answers, strict=True) if not answer
    )


def _answers(address: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(address, timeout=DIAL_LIMIT_S):
            return True
    except OSError:
        return False


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _scheduler_parameters(deadline_s: float) -> Answer:
    said = _ask(deadline_s, "scontrol", "show", "config")
    if isinstance(said, tools.SlurmFailed):
        return said
    return next((line for line in said.splitlines() if line.startswith("SchedulerParameters")), "")


def _ask(deadline_s: float, *command: str) -> Answer:
    timeout_s = round(max(deadline_s - time.monotonic(), LEAST_LIMIT_S), 1)
    try:
        return tools.call(*command, timeout_s=timeout_s)
    except tools.SlurmFailed as error:
        return error
