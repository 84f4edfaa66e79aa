"""Who is left of a job: what etcd says, and where etcd is silent, whether an agent still answers."""

from __future__ import annotations

import time
from pathlib import Path

from deadpool.cli.dial import silent_ones
from deadpool.cli.rundir import read_agents
from deadpool.cli.slurm.job import read_ends
from deadpool.config import Config
from deadpool.errors import StoreUnavailable
from deadpool.membership.etcd import EtcdStore
from deadpool.membership.registry import Registry
from deadpool.runtime.endpoints import etcd_config

UNREACHABLE_S = 5.0  # the job's own etcd ends with its hosts; shorter silences are elections


class Members:
    """Looks for members of a job that runs, or ends.

    Args:
        run_dir: folder of this submission.
        config: of the job.
    """

    def __init__(self, run_dir: Path, config: Config) -> None:
        self._run_dir = run_dir
        self._config = config
        self._missing_since_s: float | None = None
        self._silent_since_s: float | None = None

    def ask(self) -> None:
        """Ask etcd who is registered."""
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
    def missing_s(self) -> float:
        """For how long etcd has said that nobody is registered; 0 if somebody is, or it is silent."""
        return 0.0 if self._missing_since_s is None else time.monotonic() - self._missing_since_s

    def have_ended(self) -> bool:
        """Whether nobody is registered, or etcd has been silent for UNREACHABLE_S and no agent answers.

        Silence alone tells little: a job trains on while its etcd is away.
        """
        if self._silent_since_s is None:
            return self._missing_since_s is not None
        return time.monotonic() - self._silent_since_s >= UNREACHABLE_S and not self._an_agent_answers()

    def _an_agent_answers(self) -> bool:
        ended = read_ends(self._run_dir)
        left = {agent.address for agent in read_agents(self._run_dir) if agent.host not in ended}
        addresses = [(host, int(port)) for host, _, port in (address.rpartition(":") for address in left)]
        return len(silent_ones(addresses)) < len(addresses)
