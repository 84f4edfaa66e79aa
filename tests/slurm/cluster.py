"""A Slurm of our own on this machine: munged, slurmctld and one slurmd a node; no systemd, no fixed ports.

With namespaces, every node has a network namespace of its own, joined by a bridge, and a node can be cut off.
Everything lives in one folder and ends with the test. Needs root and the packages slurm-wlm and munge.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from deadpool.liveness.stat import parent_of
from deadpool.membership.embedded import free_ports
from tests.namespaces import SWITCH, Namespaces

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
SLURMD_TIMEOUT_S = 5
UP_LIMIT_S = 30.0
POLL_S = 0.1
_T = TypeVar("_T")

_CONF = """\
ClusterName=test
SlurmctldHost={host}({controller})
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=permit_job_expansion,batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout={timeout_s}
TCPTimeout=2
MessageTimeout=5
InactiveLimit=0
KillWait=20
MinJobAge=300
TreeWidth=50
{extra}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
_NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} "
    "CPUs=2 Sockets=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=2000 State=UNKNOWN\n"
)


def why_not() -> str:
    """Why no Slurm can be run here; "" if one can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"no {', '.join(missing)} on this machine: apt-get install slurm-wlm munge"
    if os.getuid() != 0:
        return "a Slurm of our own needs root"
    return ""


def wait_until(look: Callable[[], _T], what: str, limit_s: float) -> _T:
    """Return the first true value that `look` gives; fails when time is up.

    A command that fails is no answer yet: a busy slurmctld may not take a connection in time.
    """
    deadline_s = time.monotonic() + limit_s
    problem = ""
    while True:
        try:
            if value := look():
                return value
        except subprocess.SubprocessError as error:
            problem = f"; last error: {error}"
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no {what} within {limit_s:g} s{problem}")
        time.sleep(POLL_S)


class Cluster:
    """The daemons, and what a user and an operator do with them.

    Args:
        folder: for everything.
        n_nodes: nodes n1, n2, ...
        extra: further lines of slurm.conf.
        topology: lines of topology.conf; "" for a flat network.
        is_cuttable: give every node a network namespace.
        timeout_s: SlurmdTimeout: a node that is silent for longer is given up.
    """

    def __init__(
        self,
        folder: Path,
        n_nodes: int,
        *,
        extra: str = "",
        topology: str = "",
        is_cuttable: bool = False,
        timeout_s: int = SLURMD_TIMEOUT_S,
    ) -> None:
        self.folder = folder
        self.nodes = [f"n{index + 1}" for index in range(n_nodes)]
        self._extra = extra
        self._topology = topology
        self._timeout_s = timeout_s
        self._net = Namespaces(self.nodes) if is_cuttable else None
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **os.environ,
            "PATH": _path(),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "TMPDIR": str(folder / "tmp"),  # of the nodes: one that is killed leaves its etcd's data behind
        }
        if is_cuttable:
            self.environment["GLOO_SOCKET_IFNAME"] = "eth0"  # the host name means nothing in a namespace

    # ---- life ----------------------------------------------------------------------------------------

    def start(self) -> None:
        folder = self.folder
        for name in ("state", "spool", "munge", "tmp"):
            (folder / name).mkdir(parents=True)
        (folder / "munge").chmod(0o700)
        key = folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        if self._net is not None:
            self._net.start()
        self._write_conf()
        self._spawn(
            "munged",
            [
                *("munged", "--force", "--foreground", f"--key-file={key}", f"--socket={folder}/munge.sock"),
                *(f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log"),
                *(f"--seed-file={folder}/munge/seed", "--num-threads=4"),
            ],
        )
        wait_until((folder / "munge.sock").exists, "munge socket", UP_LIMIT_S)
        self._spawn("slurmctld", [*self._switch(), "slurmctld", "-D", "-c"])
        for node in self.nodes:
            self.start_node(node)
        wait_until(
            lambda: (
                self.call("sinfo", "--noheader", "--states=idle", "--format=%D").strip()
                == str(len(self.nodes))
            ),
            "idle nodes",
            UP_LIMIT_S,
        )

    def close(self) -> None:
        """End all daemons and everything that they started."""
        _kill([pid for pid, _ in self._processes()])
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        if self._net is not None:
            self._net.close()

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    # ---- an operator's view --------------------------------------------------------------------------

    def start_node(self, node: str) -> None:
        """Start slurmd of a node; also of one that was killed."""
        (self.folder / "spool" / node).mkdir(exist_ok=True)
        prefix = [] if self._net is None else self._net.inside(node)
        self._spawn(node, [*prefix, "slurmd", "-D", "-N", node])

    def kill_node(self, node: str) -> None:
        """What a power loss does: slurmd, its step daemons and all their processes are gone at once."""
        tasks = [pid for pid, environment in self._processes() if environment.get("SLURMD_NODENAME") == node]
        # A step daemon does not tell its node; that of its task does.
        parents = {parent for pid in tasks if (parent := parent_of(pid)) is not None}
        steps = {parent for parent in parents if _name(parent) == "slurmstepd"}
        victims = [self._daemons[node].pid, *steps, *tasks]
        # Nobody does anything more: each srun has a child that cancels its step.
        _kill(victims, signal.SIGSTOP)
        # Parents last. The end of one may orphan a group of stopped processes, which the kernel continues:
        # each srun would then cancel the step of another node.
        _kill(victims[::-1])
        self._daemons[node].wait()

    def cut_node(self, node: str) -> None:
        """Take the node's link down: nobody hears anything of it, and it runs on."""
        assert self._net is not None
        self._net.cut_off(node)

    def heal_node(self, node: str) -> None:
        assert self._net is not None
        self._net.heal(node)

    # ---- a user's view -------------------------------------------------------------------------------

    def call(self, *command: str) -> str:
        done = subprocess.run(
            [*self._switch(), *command],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if done.returncode:
            raise subprocess.SubprocessError(f"{command}: {done.stderr or done.stdout}")
        return done.stdout

    def submit(self, script: Path, *options: str) -> str:
        """Submit a job; returns its id."""
        text = self.call("sbatch", "--parsable", f"--chdir={script.parent}", *options, str(script))
        return text.strip()

    def show(self, job: str) -> dict[str, str]:
        words = self.call("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.partition("=")[::2] for word in words if "=" in word)

    def is_in_queue(self, job: str) -> bool:
        return bool(self.call("squeue", "--noheader", "--format=%i", f"--jobs={job}").strip())

    def step_on(self, node: str) -> str:
        """Id of the one step that runs on a node, besides the batch script."""
        shown = self.call("squeue", "--noheader", "--steps", f"--nodelist={node}", "--format=%i").split()
        [step] = [name for name in shown if not name.endswith("batch")]
        return step

    # ---- inside --------------------------------------------------------------------------------------

    def _switch(self) -> list[str]:
        return [] if self._net is None else self._net.inside(SWITCH)

    def _spawn(self, name: str, command: Sequence[str]) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def _write_conf(self) -> None:
        host = socket.gethostname()
        if self._net is None:
            ports = free_ports(1 + len(self.nodes))
            addresses = dict.fromkeys([SWITCH, *self.nodes], "127.0.0.1")
        else:
            ports = [26817] + [26818] * len(self.nodes)  # of namespaces of our own
            addresses = self._net.addresses
        extra = self._extra + ("\nTopologyPlugin=topology/tree" if self._topology else "")
        text = _CONF.format(
            host=host,
            controller=addresses[SWITCH],
            controller_port=ports[0],
            folder=self.folder,
            timeout_s=self._timeout_s,
            extra=extra,
        )
        head, partition = text.rsplit("PartitionName", 1)
        for node, port in zip(self.nodes, ports[1:], strict=True):
            head += _NODE.format(name=node, host=host, address=addresses[node], port=port)
        (self.folder / "slurm.conf").write_text(f"{head}PartitionName{partition}")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        if self._topology:
            (self.folder / "topology.conf").write_text(self._topology)

    def _processes(self) -> list[tuple[int, dict[str, str]]]:
        """Process id and environment of all that belongs to this Slurm: daemons, steps and tasks."""
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        found = ((pid, _environment(pid)) for pid in pids if pid != os.getpid())
        return [each for each in found if each[1].get("SLURM_CONF") == self.environment["SLURM_CONF"]]


def _path() -> str:
    """PATH with the daemons' folder and that of `deadpool`."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin"])


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _environment(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(item.partition("=")[::2] for item in text.split("\0") if "=" in item)


def _kill(pids: Sequence[int], number: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
