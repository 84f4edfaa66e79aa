"""Hosts with the wrong papers, other versions or too little memory, and hosts among strangers."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import deadpool
from deadpool.core.types import Member
from deadpool.events import boottime_s
from deadpool.membership.embedded import EmbeddedEtcd
from deadpool.membership.etcd import EtcdConfig, EtcdStore
from deadpool.membership.registry import Registry
from deadpool.testing.cluster import HostsJob, JobSpec
from tests.contract.membership.support import EtcdProcess, add_users, tls_options

TLS = Path(__file__).resolve().parents[1] / "contract" / "membership" / "tls"
PASSWORD = "DEADPOOL_MEMBERSHIP_PASSWORD"
MOST_GROWTH_BYTES = 64 << 20
ByHand = Callable[..., HostsJob]
CGROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    """TLS with client certificates, and passwords."""
    server = EtcdProcess.start_one(
        tmp_path_factory.mktemp("guarded"),
        *tls_options(TLS),
        config=EtcdConfig(
            endpoints=(), ca_file=TLS / "ca.crt", cert_file=TLS / "client.crt", key_file=TLS / "client.key"
        ),
    )
    try:
        add_users(server)
        yield server
    finally:
        server.close()


RIGHT = {"ca": "ca.crt", "cert": "client.crt", "key": "client.key"}


@pytest.mark.parametrize(
    ("files", "password", "code", "says"),
    [
        ({**RIGHT, "ca": "other-ca.crt"}, "secret", 5, "Check the TLS files"),
        pytest.param({"ca": "ca.crt"}, "secret", 5, "Check the TLS files", marks=pytest.mark.full),
        (RIGHT, "wrong", 5, "Check user and password"),
        ({**RIGHT, "key": "server.key", "ca": "README.md"}, "", 2, "cannot be used as an authority"),
    ],
    ids=["another authority", "no certificate", "a wrong password", "files that do not belong together"],
)
def test_wrong_papers_end_the_host_with_one_message_and_leave_nothing(
    guarded: EtcdProcess,
    tmp_path: Path,
    by_hand: ByHand,
    files: dict[str, str],
    password: str,
    code: int,
    says: str,
) -> None:
    options = [word for name, file in files.items() for word in (f"--etcd-{name}", str(TLS / file))]
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    job = by_hand([guarded.endpoint], nnodes=2, options=(*options, "--etcd-user", "trainer"))
    job.start_host(environment={PASSWORD: password, "XDG_RUNTIME_DIR": str(runtime)})

    assert set(job.wait().values()) == {code}, job.output
    lines = job.output.splitlines()
    assert says in job.output
    assert "Traceback" not in job.output
    assert "secret" not in job.output
    if code == 5:
        assert len([line for line in lines if "control plane unreachable" in line]) == 1, job.output
    else:  # all problems at once
        assert len(lines) == 3, job.output
        assert "key values mismatch" in job.output
        assert "user and password go together" in job.output
    assert list(runtime.rglob("*.json")) == []
    root = EtcdStore(
        EtcdConfig(
            endpoints=guarded.config.endpoints,
            ca_file=TLS / "ca.crt",
            cert_file=TLS / "client.crt",
            key_file=TLS / "client.key",
            user="trainer",
            password="secret",
        )
    )
    with root as store:
        assert store.get_prefix("/deadpool/")[0] == []


def other_deadpool(folder: Path) -> str:
    """A copy of the package with another version, as a host has it whose image was built last week."""
    source = Path(deadpool.__file__).parent
    shutil.copytree(source, folder / "deadpool", symlinks=False, ignore=shutil.ignore_patterns("__pycache__"))
    init = folder / "deadpool" / "__init__.py"
    text = init.read_text()
    assert f'__version__ = "{deadpool.__version__}"' in text
    init.write_text(text.replace(f'"{deadpool.__version__}"', '"0.0.9"'))
    return "deadpool 0.0.9"


def other_torch(folder: Path) -> str:
    """Torch's own files under another version file."""
    source = Path(torch.__file__).parent
    (folder / "torch").mkdir(parents=True)
    for each in source.iterdir():
        if each.name not in ("version.py", "__pycache__"):
            (folder / "torch" / each.name).symlink_to(each)
    text = (source / "version.py").read_text()
    assert str(torch.__version__) in text
    (folder / "torch" / "version.py").write_text(text.replace(str(torch.__version__), "2.12.0+other"))
    return "torch 2.12.0+other"


@pytest.mark.full
@pytest.mark.parametrize("make_site", [other_deadpool, other_torch])
def test_a_spare_with_another_version_is_turned_away_and_the_job_goes_on(
    etcd: EmbeddedEtcd, tmp_path: Path, by_hand: ByHand, make_site: Callable[[Path], str]
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    has = make_site(site)
    job = by_hand([etcd.endpoint], ("--steps", "150"), nnodes=2)
    active = [job.start_host() for _ in range(2)]
    job.wait_for(lambda event: event["event"] == "snapshot.committed", "commit")
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    # Safe path: the folder in which the test runs would come before, and hold this version.
    spare = job.start_host(environment={"PYTHONPATH": path, "PYTHONSAFEPATH": "1"})

    codes = job.wait()
    text = job.output_of(spare)
    assert codes.pop(spare.pid) == 73, text
    assert f"has {has}, " in text
    assert "every host needs the same" in text
    assert "Traceback" not in text
    assert codes == {host.pid: 0 for host in active}, job.output[-4000:]
    assert not job.named("recovery.begin")


@pytest.mark.full
@pytest.mark.parametrize("limited_by", ["RLIMIT_FSIZE", "cgroup"])
def test_too_little_memory_ends_the_job_with_code_2_and_both_numbers(
    etcd: EmbeddedEtcd, tmp_path: Path, limited_by: str
) -> None:
    script = tmp_path / "large.py"
    script.write_text(LARGE)
    spec = JobSpec(script=script, run_dir=tmp_path / "run", options=("--nnodes", "2", "--lease-ttl-s", "3"))
    with ExitStack() as stack:
        if limited_by == "RLIMIT_FSIZE":
            limit = "ulimit -f 100000"  # blocks of 512 or 1,024 bytes: above the self-test's 32 MiB
            expected = "RLIMIT_FSIZE allows"
        else:
            group = make_cgroup(512 << 20)
            stack.callback(group.rmdir)
            limit = f"echo $$ > {group}/cgroup.procs"
            expected = f"cgroup {group}"
        job = stack.enter_context(HostsJob(spec, [etcd.endpoint], "by-hand"))
        job.start_host(wrapper=("sh", "-c", f'{limit}; exec "$@"', "sh"))
        job.start_host()
        codes = job.wait()
    assert set(codes.values()) == {2}, job.output
    refusals = [line for line in job.output.splitlines() if "host memory on" in line]
    assert any(expected in line and "MiB" in line for line in refusals), job.output
    assert "Traceback" not in job.output
    with EtcdStore(EtcdConfig(endpoints=(etcd.endpoint,))) as store:
        assert store.get_prefix("/deadpool/")[0] == []


LARGE = """
import torch
from torch.nn.parallel import DistributedDataParallel
import deadpool

deadpool.init()
model = DistributedDataParallel(torch.nn.Linear(4096, 4096))  # 64 MiB; 192 with its optimizer's
optimizer = torch.optim.AdamW(model.parameters())


def train(ft):
    for _ in ft.steps(3):
        pass


deadpool.wrap(train, model=model, optimizer=optimizer)()
"""


def make_cgroup(limit_bytes: int) -> Path:
    """A memory cgroup with a limit; version 1 or 2, whichever this machine lets a test make."""
    name = f"deadpool-test-{os.getpid()}"
    for parent, limit_file in ((CGROUPS[0], "memory.limit_in_bytes"), (CGROUPS[1], "memory.max")):
        group = parent / name
        with suppress(OSError), ExitStack() as undo:
            group.mkdir()
            undo.callback(group.rmdir)
            if (group / limit_file).exists():
                (group / limit_file).write_text(str(limit_bytes))
                undo.pop_all()
                return group
    pytest.skip("this machine lets a test make no memory cgroup")


HOSTILE = (
    os.urandom(1 << 16),
    struct.pack(">I", (1 << 32) - 1),
    struct.pack("<I", (1 << 32) - 1) * 32,
    b"GET / HTTP/1.1\r\n\r\n",
    b"DEADPOOL",  # half a greeting, and then silence
    b"\0\0",
    b"",
)


@pytest.mark.full
def test_hostile_bytes_on_every_port_of_every_host_disturb_nothing(
    rig: Any, etcd: EmbeddedEtcd, by_hand: ByHand
) -> None:
    args = ("--steps", "160")
    job = by_hand([etcd.endpoint], args, nnodes=2)
    for _ in range(3):
        job.start_host()
    job.wait_for(lambda event: event["event"] == "snapshot.committed" and event["step"] >= 5, "commit")
    with EtcdStore(EtcdConfig(endpoints=(etcd.endpoint,))) as store:
        members = Registry(store, "by-hand").members()
    assert len(members) == 3
    before = {member.pid: memory_bytes(member.pid) for member in members}

    attackers = [threading.Thread(target=attack, args=(member,)) for member in members]
    for attacker in attackers:
        attacker.start()
    for attacker in attackers:
        attacker.join()
    attacked_s = boottime_s()
    job.wait_for(
        lambda event: event["event"] == "snapshot.committed" and event["monotonic_s"] > attacked_s,
        "commit after the attack",
    )

    grown = {pid: memory_bytes(pid) - was for pid, was in before.items()}
    assert max(grown.values()) < MOST_GROWTH_BYTES, grown
    assert set(job.wait().values()) == {0}, job.output[-6000:]
    assert not job.named("recovery.begin")
    rig.check_trace(job, args, 2)
    assert "Traceback" not in job.output
    for host in job.hosts:
        lines = job.output_of(host).splitlines()
        for port in ("control", "data", "rendezvous"):
            told = [line for line in lines if f"{port} port: closed a connection" in line]
            assert 1 <= len(told) <= 10, (port, told)


def attack(member: Member, rounds: int = 20) -> None:
    """Every port of one host: some connections at once, each with something hostile, none of them closed."""
    with ExitStack() as stack:
        for port in (member.control_port, member.data_port, member.rendezvous_port):
            for _ in range(rounds):
                for content in HOSTILE:
                    with suppress(OSError):
                        sock = stack.enter_context(
                            socket.create_connection((member.address, port), timeout=5.0)
                        )
                        sock.sendall(content)
        threading.Event().wait(6.0)  # beyond the time in which strangers must have said who they are


def memory_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no VmRSS")
