"""Jobs and programs of a Slurm that is not there."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from deadpool.cli.slurm.job import SlurmJob
from deadpool.config import Config, JobConfig, MembershipConfig


def make_job(config: Config, **fields: Any) -> SlurmJob:
    known = {"slurm_id": "7", "token": "t", "nodes": ("n1",), "batch_host": "n1", "batch_address": None}
    return SlurmJob(config=config.to_bytes(), **{**known, **fields})


def fake(folder: Path, name: str, *lines: str) -> Path:
    """A program that notes its arguments and then does what `lines` say."""
    path = folder / name
    path.write_text("\n".join(["#!/bin/sh", f'echo "{name} $*" >> {folder}/calls', *lines]) + "\n")
    path.chmod(0o755)
    return path


def write_result(run_dir: Path, **fields: object) -> None:
    (run_dir / "result.json").write_text(json.dumps({"reason": "It ended.", **fields}))


FINISHED = {"exit_code": 0, "phase": "finished", "members": ["n1-aa", "n2-bb"]}


def away(endpoint: str = "") -> Config:
    """A job whose etcd is at `endpoint`, or nowhere."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = f"127.0.0.1:{closed.getsockname()[1]}"
    membership = MembershipConfig(etcd=(endpoint or nowhere,), start_timeout_s=0.0)
    return Config(job=JobConfig(job_id="slurm-7"), membership=membership)
