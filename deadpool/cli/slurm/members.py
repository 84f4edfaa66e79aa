"""Who is left of a job: what etcd says, and whether an agent still answers."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deadpool.cli.agents import ask_agent
from deadpool.cli.rundir import read_agents
from deadpool.cli.slurm.job import SlurmJob, read_ends
from deadpool.errors import StoreUnavailable
from deadpool.membership.etcd import EtcdStore
from deadpool.membership.registry import Registry
from deadpool.runtime.endpoints import etcd_config

UNREACHABLE_S = 5.0  # the job's own etcd ends with its hosts; shorter silences are elections
ANSWER_S = 1.0
ASKED_AT_ONCE = 64


class Members:
    """Looks for members of a job that runs, or ends.

    Args:
        run_dir: folder of this submission.
        job: what `prepare` wrote.
    """

    def __init__(self, run_dir: Path, job: SlurmJob) -> None:
        self._run_dir = run_dir
        self._token = job.token
        self._config = job.decode_config()
        self._missing_since_s: float | None = None
        self._silent_since_s: float | None = None

    def ask(self) -> None:
        """Ask etcd who is registered.

        Raises:
            DeadPoolError: it cannot be asked, as its certificates cannot be read, say.
        """
        now_s = time.monotonic()
        store = EtcdStore(etcd_config(self._config.membership))
        try:
            store.connect()
            is_missing = not Registry(store, self._config.job.job_id).members()
        except StoreUnavailable:
            self._silent_since_s = self._silent_since_s or now_s
            self._missing_since_s = None
            return
        finally:
            store.close()
        self._silent_since_s = None
        self._missing_since_s = (self._missing_since_s or now_s) if is_missing else None

    @property
    def are_missing(self) -> bool:
        """Whether etcd, when it was last asked, answered that nobody is registered."""
        return self._missing_since_s is not None

    @property
    def missing_s(self) -> float:
        """For how long etcd has said that nobody is registered; 0 if somebody is, or it is silent."""
        return 0.0 if self._missing_since_s is None else time.monotonic() - self._missing_since_s

    def have_ended(self) -> bool:
        """Whether nobody is registered, or etcd has been silent for UNREACHABLE_S; and no agent answers.

        What etcd says is not enough: a job trains on while its hosts cannot reach etcd.
        """
        if self._silent_since_s is not None:
            seems_over = time.monotonic() - self._silent_since_s >= UNREACHABLE_S
        else:
            seems_over = self.are_missing
        return seems_over and not self._an_agent_answers()

    def _an_agent_answers(self) -> bool:
        ended = read_ends(self._run_dir)
        addresses = {agent.address for agent in read_agents(self._run_dir) if agent.host not in ended}
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            return any(pool.map(self._answers, addresses))

    def _answers(self, address: str) -> bool:
        return ask_agent(address, self._token, time.monotonic() + ANSWER_S) is not None
