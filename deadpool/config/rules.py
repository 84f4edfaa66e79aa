"""Rules over several settings: what must hold, and the sentence for when it does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deadpool.config import Config  # which imports this

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_MIN_GRANTED_LEASE_TTL_S = 2.0  # etcd grants no less with its default election timeout


def broken_rules(config: Config) -> list[str]:
    """Sentences for the rules over several settings that `config` breaks, each with the values' origins."""
    problems = []
    for names, holds, sentence in _RULES:
        if not holds(config):
            shown = ", ".join(f"{name} = {_value(config, name)!r} ({config.origin(name)})" for name in names)
            problems.append(f"{sentence}: {shown}")
    return problems


# Settings concerned, what must hold, and the sentence for when it does not.
_RULES: tuple[tuple[tuple[str, ...], Callable[[Config], bool], str], ...] = (
    (
        ("job.job_id",),
        lambda c: not c.job.job_id or _JOB_ID.fullmatch(c.job.job_id) is not None,
        "a job id is made of letters, digits, '.', '_' and '-', at most 63 of them",
    ),
    (
        ("membership.lease_ttl_s",),
        lambda c: c.membership.lease_ttl_s >= _MIN_GRANTED_LEASE_TTL_S,
        "etcd grants no lease shorter than 2 s",
    ),
    (
        ("liveness.heartbeat_interval_s", "liveness.silence_dead_s"),
        lambda c: 3 * c.liveness.heartbeat_interval_s <= c.liveness.silence_dead_s,
        "three heartbeats must fit into the silence that means death",
    ),
    (
        ("liveness.heartbeat_interval_s", "liveness.silence_suspect_s", "liveness.silence_dead_s"),
        lambda c: c.liveness.heartbeat_interval_s < c.liveness.silence_suspect_s < c.liveness.silence_dead_s,
        "the order is heartbeat interval < suspect < dead",
    ),
    (
        ("liveness.heartbeat_interval_s", "membership.lease_ttl_s"),
        lambda c: 3 * c.liveness.heartbeat_interval_s <= c.membership.lease_ttl_s,
        "three heartbeats must fit into a lease",
    ),
    (
        ("membership.lease_ttl_s", "communicator.rebuild_timeout_s"),
        lambda c: c.membership.lease_ttl_s < c.communicator.rebuild_timeout_s,
        "a rebuild must wait longer than a lease lives, or it gives up on a host before its loss is known",
    ),
    (
        ("membership.lease_ttl_s", "communicator.collective_timeout_s"),
        lambda c: c.membership.lease_ttl_s < c.communicator.collective_timeout_s,
        "a collective must wait longer than a lease lives, or it fails before membership knows why",
    ),
    (
        ("liveness.progress_timeout_s", "communicator.collective_timeout_s"),
        lambda c: c.liveness.progress_timeout_s < c.communicator.collective_timeout_s,
        "a collective must wait longer than the progress timeout, or it fails before the culprit is named",
    ),
    (
        ("communicator.close_timeout_s", "communicator.abort_timeout_s", "communicator.unwind_timeout_s"),
        lambda c: (
            c.communicator.close_timeout_s
            <= c.communicator.abort_timeout_s
            <= c.communicator.unwind_timeout_s
        ),
        "the order is close <= abort <= unwind",
    ),
    (
        ("store.replication_factor", "job.nnodes"),
        lambda c: c.store.replication_factor < c.job.nnodes,
        "a replica needs another active host: raise --nnodes or lower the replication factor",
    ),
    (
        ("run.node_rank", "job.nnodes", "job.spares"),
        lambda c: c.run.node_rank is None or c.run.node_rank < c.job.nnodes + c.job.spares,
        "a node rank is below the number of hosts, spares included",
    ),
    (
        ("run.standalone", "membership.etcd"),
        lambda c: not (c.run.standalone and c.origin("membership.etcd").startswith("command line")),
        "--standalone starts its own etcd: give --standalone or --etcd, not both",
    ),
    (
        ("run.standalone", "run.node_rank"),
        lambda c: not (c.run.standalone and c.run.node_rank is not None),
        "--standalone places all hosts itself: leave --node-rank out",
    ),
    (
        ("run.respawn", "run.standalone"),
        lambda c: not c.run.respawn or c.run.standalone,
        "--respawn starts hosts again, which only --standalone can",
    ),
    (
        ("checkpoint.every", "checkpoint.dir"),
        lambda c: not c.checkpoint.every or bool(c.checkpoint.dir),
        "checkpoints need a folder: give --checkpoint-dir",
    ),
    (
        ("membership.cert", "membership.key"),
        lambda c: bool(c.membership.cert) == bool(c.membership.key),
        "a client certificate and its key come together",
    ),
    (
        ("membership.etcd",),
        lambda c: all(_is_endpoint(endpoint) for endpoint in c.membership.etcd),
        "an etcd endpoint has the form HOST or HOST:PORT",
    ),
)


def _value(config: Config, name: str) -> object:
    section, _, field_name = name.partition(".")
    return getattr(getattr(config, section), field_name)


def _is_endpoint(text: str) -> bool:
    """A first look only: `deadpool.membership` reads endpoints for good."""
    return re.fullmatch(r"(https?://)?(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\],]+)(:\d{1,5})?/?", text) is not None
