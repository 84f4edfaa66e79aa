from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest
from msgspec.structs import replace

from deadpool.cli.jobs import (
    JobFile,
    find_job,
    find_job_at,
    is_running,
    job_file,
    note_token,
    runtime_dir,
    write_job_file,
)
from deadpool.cli.slurm.job import write_job
from deadpool.config import Config, JobConfig, MembershipConfig
from deadpool.errors import ConfigError
from tests.unit.cli.slurm_jobs import make_job

NO_PROCESS = 2**22 + 1  # beyond the largest process id


def make(job_id: str, pid: int) -> JobFile:
    return JobFile(job_id=job_id, token="secret", run_dir="/runs/x", pid=pid, etcd=("h:1",))


def test_a_job_file_is_found_again_and_only_its_user_may_read_it(tmp_path: Path) -> None:
    job = make("j1", os.getpid())
    path = write_job_file(job, tmp_path / "deadpool")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert find_job("j1", tmp_path / "deadpool") == job
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["j1.json"]


def test_the_token_is_noted_by_the_launcher_that_has_the_file(tmp_path: Path) -> None:
    job = replace(make("j1", os.getpid()), token="")
    with job_file(job, tmp_path):
        note_token(job, "secret", tmp_path)
        assert find_job("j1", tmp_path).token == "secret"
        note_token(replace(job, pid=NO_PROCESS), "of another launcher", tmp_path)
        assert find_job("j1", tmp_path).token == "secret"
    note_token(job, "too late", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_an_id_the_only_running_job_is_meant(tmp_path: Path) -> None:
    write_job_file(make("over", NO_PROCESS), tmp_path)
    with pytest.raises(ConfigError, match="no job runs"):
        find_job(None, tmp_path)
    write_job_file(make("one", os.getpid()), tmp_path)
    assert find_job(None, tmp_path).job_id == "one"
    write_job_file(make("two", os.getpid()), tmp_path)
    with pytest.raises(ConfigError, match="name one: one, two"):
        find_job(None, tmp_path)


def test_an_unknown_job_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    write_job_file(make("one", os.getpid()), tmp_path)
    with pytest.raises(ConfigError, match=r"no job 'two' .*known jobs: one"):
        find_job("two", tmp_path)


def test_a_name_with_a_path_in_it_stays_in_the_folder(tmp_path: Path) -> None:
    inner = tmp_path / "deadpool"
    write_job_file(make("outside", os.getpid()), tmp_path)
    inner.mkdir()
    with pytest.raises(ConfigError, match="known jobs: none"):
        find_job("../outside", inner)


def test_the_runtime_directory_follows_the_environment(tmp_path: Path) -> None:
    assert runtime_dir({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "deadpool"
    elsewhere = runtime_dir({"XDG_RUNTIME_DIR": str(tmp_path / "absent")})
    usual = Path(f"/run/user/{os.getuid()}")
    shared = Path(tempfile.gettempdir()) / f"deadpool-{os.getuid()}"
    assert elsewhere == (usual / "deadpool" if os.access(usual, os.W_OK) else shared)


def test_running_means_that_the_process_exists() -> None:
    assert is_running(os.getpid())
    assert not is_running(NO_PROCESS)
    assert not is_running(0)


def test_of_several_hosts_on_one_machine_the_first_keeps_the_file_of_the_job(tmp_path: Path) -> None:
    first, second = (
        JobFile(job_id="j", token="", run_dir="/r", pid=pid) for pid in (os.getpid(), os.getppid())
    )
    path = tmp_path / "j.json"
    with job_file(first, tmp_path):
        with job_file(second, tmp_path):
            assert find_job("j", tmp_path).pid == first.pid
        assert path.exists()
    assert not path.exists()


def test_the_file_of_a_killed_host_is_taken_over(tmp_path: Path) -> None:
    write_job_file(make("j", NO_PROCESS), tmp_path)
    with job_file(make("j", os.getpid()), tmp_path):
        assert find_job("j", tmp_path).pid == os.getpid()


def test_a_job_under_slurm_is_named_by_its_run_folder(tmp_path: Path) -> None:
    access = MembershipConfig(etcd=("h:1", "h:2"), ca="ca.crt", cert="job.crt", key="job.key")
    write_job(tmp_path, make_job(Config(job=JobConfig(job_id="slurm-7"), membership=access)))
    job = find_job_at(str(tmp_path), None)
    assert (job.job_id, job.token, job.run_dir) == ("slurm-7", "t", str(tmp_path))
    assert (job.etcd, job.ca, job.cert, job.key) == (access.etcd, access.ca, access.cert, access.key)
