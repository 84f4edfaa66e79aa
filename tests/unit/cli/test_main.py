from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deadpool.cli.options import read_run_config
from deadpool.errors import ConfigError


def deadpool(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; sys.argv[0] = 'deadpool'\n"
        "from deadpool.cli.main import app\n"
        "try:\n"
        "    app()\n"
        "finally:\n"
        "    assert 'torch' not in sys.modules\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "100", "PYTHONPATH": ":".join(sys.path), **environment},
    )


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def test_the_verbs_are_shown_and_no_others() -> None:
    done = deadpool("--help")
    assert done.returncode == 0
    commands = done.stdout.partition("Commands:")[2].split("\n")
    assert [line.split()[0] for line in commands if line.strip()] == [
        *("run", "verify", "status", "inject", "readmit", "doctor", "slurm")
    ]


def test_the_version_is_shown() -> None:
    assert deadpool("--version").stdout.startswith("deadpool 0.")


@pytest.mark.parametrize("verb", ["run", "verify"])
def test_run_and_verify_take_the_same_options(verb: str) -> None:
    text = deadpool(verb, "--help").stdout
    for flag in (
        *("--standalone", "--etcd", "--nnodes", "--spares", "--nproc-per-node", "--job-id", "--node-rank"),
        *("--lease-ttl-s", "--silence-dead-s", "--progress-timeout-s", "--collective-timeout-s"),
        *("--spare-wait-s", "--checkpoint-dir", "--checkpoint-every", "--events", "--report", "--inject"),
        *("--respawn", "--no-rehearse", "--keep-steps", "--config"),
    ):
        assert f"{flag} " in text or f"{flag}\n" in text, flag


@pytest.mark.parametrize("verb", ["run", "verify"])
def test_an_unknown_flag_is_refused_with_the_nearest_one(verb: str, script: str) -> None:
    done = deadpool(verb, "--standalone", "--nnode", "2", script)
    assert done.returncode == 2
    assert "No such option: --nnode" in done.stderr
    assert "--nnodes" in done.stderr


def test_all_problems_are_told_at_once_and_the_code_is_2(script: str) -> None:
    done = deadpool(
        "verify",
        *("--standalone", "--etcd", "h:1", "--inject", "oom:rank=0@step=1", "--silence-dead-s", "0.1"),
        f"{script}.absent",
    )
    assert done.returncode == 2
    for problem in (
        "give --standalone or --etcd, not both",
        "unknown kind 'oom'",
        "three heartbeats",
        "is not a file",
    ):
        assert problem in done.stderr
    assert all(line.startswith("deadpool: ") for line in done.stderr.splitlines())


def test_a_missing_script_and_a_missing_number_of_hosts_are_bad_input(script: str) -> None:
    done = deadpool("verify", "--standalone", "--nnodes", "2")
    assert (done.returncode, "Missing argument 'SCRIPT'" in done.stderr) == (2, True)
    done = deadpool("verify", script)
    assert done.returncode == 2
    assert "give --nnodes" in done.stderr
    assert "give --standalone" in done.stderr


def test_a_bad_value_is_refused_by_name(script: str) -> None:
    done = deadpool("run", "--standalone", "--nnodes", "two", script)
    assert (done.returncode, "--nnodes" in done.stderr) == (2, True)


def test_ranks_outside_the_world_are_refused(script: str) -> None:
    done = deadpool("verify", "--standalone", "--nnodes", "2", "--inject", "exit:rank=2@step=1", script)
    assert (done.returncode, "ranks are 0 to 1" in done.stderr) == (2, True)


def test_unknown_settings_in_a_file_or_the_environment_are_refused(tmp_path: Path, script: str) -> None:
    (tmp_path / "d.toml").write_text("[liveness]\nsilence_ded_s = 3\n")
    done = deadpool(
        *("verify", "--config", str(tmp_path / "d.toml"), "--standalone", "--nnodes", "2", script),
        DEADPOOL_JOB_SPARE="1",
    )
    assert done.returncode == 2
    assert "did you mean 'silence_dead_s'?" in done.stderr
    assert "did you mean 'DEADPOOL_JOB_SPARES'?" in done.stderr


def test_verify_without_an_injection_says_no(tmp_path: Path, script: str) -> None:
    done = deadpool("verify", "--standalone", "--nnodes", "2", script, cwd=tmp_path)
    assert done.returncode == 4
    assert done.stdout.splitlines()[-1].startswith(
        "bit-identical to the undisturbed run: no: rank 0, step 0, "
    )
    assert not (tmp_path / "deadpool-runs").exists()


def test_status_and_inject_of_an_unknown_job_are_bad_input(tmp_path: Path) -> None:
    for arguments in (("status",), ("status", "x"), ("inject", "x", "sigkill:rank=0")):
        done = deadpool(*arguments, XDG_RUNTIME_DIR=str(tmp_path))
        assert done.returncode == 2, arguments
        assert "no job" in done.stderr
    done = deadpool("inject", "x", "exit:rank=0", XDG_RUNTIME_DIR=str(tmp_path))
    assert (done.returncode, "kinds from outside" in done.stderr) == (2, True)
    done = deadpool("status", "--etcd", "h:1", XDG_RUNTIME_DIR=str(tmp_path))
    assert (done.returncode, "name the job" in done.stderr) == (2, True)


def test_everything_after_the_script_belongs_to_the_script(script: str) -> None:
    code = (
        "import typer\n"
        "from deadpool.cli.options import CONTEXT_SETTINGS, with_run_options\n"
        "app = typer.Typer()\n"
        "def show(config):\n"
        "    print(config.job.nnodes, config.run.script_args, config.membership.etcd, config.run.inject)\n"
        "    return 7\n"
        "app.command(context_settings=CONTEXT_SETTINGS)(with_run_options(show))\n"
        "app()\n"
    )
    arguments = ["--etcd", "a:1,b", "--nnodes", "3", "--inject", "exit:rank=0@step=1,at=capture"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, script, "--nnodes", "9", "--", "--help"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout == (
        "3 ('--nnodes', '9', '--', '--help') ('a:1', 'b') ('exit:rank=0@step=1,at=capture',)\n"
    )
    assert done.returncode == 7


def test_given_options_win_over_environment_and_file(tmp_path: Path, script: str) -> None:
    toml = tmp_path / "d.toml"
    toml.write_text("[job]\nnnodes = 3\nspares = 3\nnproc_per_node = 3\n")
    values = {
        "run__config_file": str(toml),
        "run__standalone": True,
        "job__nnodes": 5,
        "job__spares": None,
        "run__script": script,
    }
    config = read_run_config(values, {"DEADPOOL_JOB_SPARES": "4", "DEADPOOL_JOB_NNODES": "4"})
    assert (config.job.nnodes, config.job.spares, config.job.nproc_per_node) == (5, 4, 3)
    assert config.origin("job.nnodes") == "command line --nnodes"
    with pytest.raises(ConfigError, match="configuration file"):
        read_run_config({**values, "run__config_file": str(tmp_path / "absent")}, {})
