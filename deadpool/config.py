"""Configuration of a job: one frozen dataclass per component, read once, the origin of every value kept.

Precedence: default < TOML < environment < command line. A field `progress_timeout_s` of section `liveness`
is `progress_timeout_s` under `[liveness]` in TOML, `DEADPOOL_LIVENESS_PROGRESS_TIMEOUT_S` in the environment
and, where its declaration names a flag, `--progress-timeout-s` on the command line. Flags and help texts are
declared here, once; `deadpool.cli.options` makes the command line from them.

Every problem is found before the first one is reported. Rules over several settings live in `_RULES` and
nowhere else.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from deadpool.errors import ConfigError

ENVIRONMENT_PREFIX = "DEADPOOL_"
DEFAULT_ORIGIN = "default"
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_MIN_GRANTED_LEASE_TTL_S = 2.0  # etcd grants no less with its default election timeout (notes, M12)


def _setting(
    default: Any,
    doc: str,
    *,
    flag: str = "",
    at_least: float | None = None,
    command_line_only: bool = False,
    secret: bool = False,
    is_required: bool = False,
) -> Any:
    """Declare a field: its default, its one-line help, its flag and its smallest value.

    A required one has a default for tests only: `deadpool run` wants it from somewhere else.
    """
    metadata = {"doc": doc, "flag": flag, "at_least": at_least, "secret": secret}
    metadata |= {"command_line_only": command_line_only, "is_required": is_required}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """Which job this is and how large it is."""

    nnodes: int = _setting(2, "Active hosts N.", flag="--nnodes", at_least=1, is_required=True)
    spares: int = _setting(0, "Spare hosts S; there are N + S agents.", flag="--spares", at_least=0)
    nproc_per_node: int = _setting(1, "Workers per host.", flag="--nproc-per-node", at_least=1)
    job_id: str = _setting("", "Name of the job; made up when empty.", flag="--job-id")


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipConfig:
    """The control plane: etcd, leases, and how long the leader waits."""

    etcd: tuple[str, ...] = _setting(
        (), "Endpoints of etcd, HOST or HOST:PORT, separated by commas.", flag="--etcd"
    )
    lease_ttl_s: float = _setting(10.0, "Life of a host's lease.", flag="--lease-ttl-s", at_least=0)
    spare_wait_s: float = _setting(
        300.0,
        "How long a vacant slot waits for a spare before the job ends.",
        flag="--spare-wait-s",
        at_least=0,
    )
    suspect_s: float = _setting(
        2.0, "How long a fault waits for a confirmed death before all members are tried again.", at_least=0
    )
    ca: str = _setting("", "Certificate authority for etcd over TLS (PEM file).", flag="--etcd-ca")
    cert: str = _setting("", "Client certificate for etcd (PEM file).", flag="--etcd-cert")
    key: str = _setting("", "Key of the client certificate (PEM file).", flag="--etcd-key")
    user: str = _setting(
        "", "User name for etcd; the password comes from the environment.", flag="--etcd-user"
    )
    password: str = _setting("", "Password for etcd.", secret=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessConfig:
    """When a host or a worker counts as lost."""

    heartbeat_interval_s: float = _setting(0.25, "Interval of heartbeats between neighbours.", at_least=0.01)
    silence_suspect_s: float = _setting(1.0, "Silence after which a neighbour is suspect.", at_least=0)
    silence_dead_s: float = _setting(
        3.0,
        "Silence after which a neighbour is dead, if two observers agree.",
        flag="--silence-dead-s",
        at_least=0,
    )
    progress_timeout_s: float = _setting(
        10.0,
        "Time without a finished step after which sequence numbers are compared; at least 3 median steps.",
        flag="--progress-timeout-s",
        at_least=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorConfig:
    """Limits of the waits of an abort and a rebuild."""

    collective_timeout_s: float = _setting(
        600.0,
        "Timeout of a single collective; membership finds faults long before it.",
        flag="--collective-timeout-s",
        at_least=0,
    )
    close_timeout_s: float = _setting(2.0, "A worker closes its handles.", at_least=0)
    abort_timeout_s: float = _setting(10.0, "A worker aborts and synchronises its device.", at_least=0)
    unwind_timeout_s: float = _setting(30.0, "A worker unwinds to `wrap`.", at_least=0)
    reap_timeout_s: float = _setting(5.0, "A killed worker is reaped.", at_least=0)
    ack_timeout_s: float = _setting(15.0, "An agent acks, after the limits of its workers.", at_least=0)
    rebuild_timeout_s: float = _setting(30.0, "Communicators are rebuilt.", at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Host memory store and replication."""

    replication_factor: int = _setting(1, "Replicas of each rank on other hosts.", at_least=1)
    floor_rate_bytes_s: float = _setting(
        50e6,
        "Slowest rate of a stream that still counts as working; deadlines grow by bytes / rate.",
        at_least=1,
    )
    transfer_timeout_s: float = _setting(10.0, "Fixed part of a stream's deadline.", at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """The last resort: state on durable storage."""

    dir: str = _setting("", "Folder for checkpoints; none are written without one.", flag="--checkpoint-dir")
    every: int = _setting(
        0,
        "Steps between checkpoints; 0: only when the job ends early.",
        flag="--checkpoint-every",
        at_least=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How `deadpool run` runs the script on this machine."""

    standalone: bool = _setting(
        False,
        "Start all hosts and an embedded etcd on this machine.",
        flag="--standalone",
        command_line_only=True,
    )
    rehearse: bool = _setting(
        True, "Parked spares build the script once and throw it away.", flag="--rehearse"
    )
    respawn: bool = _setting(
        False, "With --standalone: start a lost host again, as a spare.", flag="--respawn"
    )
    keep_steps: int = _setting(
        16, "Inputs that `wrap_step` keeps to run steps again.", flag="--keep-steps", at_least=1
    )
    node_rank: int | None = _setting(
        None, "Slot wish of this host, at the first start only.", flag="--node-rank", at_least=0
    )
    domain: str = _setting(
        "", "Failure domain of this host (rack, switch); empty: the host.", flag="--domain"
    )
    address: str = _setting("", "Address other hosts reach this one at; empty: found.", flag="--address")
    run_dir: str = _setting("", "Folder of this run; empty: deadpool-runs/<job id>.", flag="--run-dir")
    record_dir: str = _setting("", "Folder for what `ft.record` is given, step by step.", flag="--record-dir")
    events: str = _setting("", "File for the events of all hosts.", flag="--events")
    report: str = _setting("", "File for the report of the run.", flag="--report")
    inject: tuple[str, ...] = _setting(
        (),
        "KIND:rank=R@step=S[,at=POINT]: inject a fault; may be repeated.",
        flag="--inject",
        command_line_only=True,
    )
    config_file: str = _setting("", "TOML file with settings.", flag="--config", command_line_only=True)
    script: str = _setting("", "Training script.", command_line_only=True)
    script_args: tuple[str, ...] = _setting((), "Arguments of the script.", command_line_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a process of a job must know. The launcher hands it to agents and workers as bytes."""

    job: JobConfig = JobConfig()
    membership: MembershipConfig = MembershipConfig()
    liveness: LivenessConfig = LivenessConfig()
    communicator: CommunicatorConfig = CommunicatorConfig()
    store: StoreConfig = StoreConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()
    origins: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def world_size(self) -> int:
        return self.job.nnodes * self.job.nproc_per_node

    def origin(self, name: str) -> str:
        """Where the value of `section.field` comes from."""
        return self.origins.get(name, DEFAULT_ORIGIN)

    def describe(self) -> list[str]:
        """One line per setting with its origin; secrets are not shown."""
        lines = []
        for setting in settings():
            value = getattr(getattr(self, setting.section), setting.field)
            shown = "(hidden)" if setting.secret and value else repr(value)
            lines.append(f"{setting.name} = {shown} ({self.origin(setting.name)})")
        return lines

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Config:
        return msgspec.msgpack.decode(data, type=cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of one section, as the readers of configuration see it."""

    section: str
    field: str
    type: Any
    default: Any
    doc: str
    flag: str
    at_least: float | None
    command_line_only: bool
    secret: bool
    is_required: bool

    @property
    def name(self) -> str:
        return f"{self.section}.{self.field}"

    @property
    def environment_name(self) -> str:
        return f"{ENVIRONMENT_PREFIX}{self.section}_{self.field}".upper()


_SECTIONS: dict[str, type[Any]] = {
    "job": JobConfig,
    "membership": MembershipConfig,
    "liveness": LivenessConfig,
    "communicator": CommunicatorConfig,
    "store": StoreConfig,
    "checkpoint": CheckpointConfig,
    "run": RunConfig,
}


def settings() -> Iterator[Setting]:
    """Every setting, in the order of declaration."""
    for section, cls in _SECTIONS.items():
        types = get_type_hints(cls)
        for item in fields(cls):
            yield Setting(
                section=section,
                field=item.name,
                type=types[item.name],
                default=item.default,
                **item.metadata,
            )


def load_config(
    *,
    toml: Path | None = None,
    environment: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
) -> Config:
    """Read the configuration of a job.

    Args:
        toml: file with tables named like the sections.
        environment: usually `os.environ`; names outside the prefix are ignored.
        arguments: `section.field` -> value as given on the command line.

    Raises:
        ConfigError: lists every unknown key, unreadable value and broken rule, each with its origin.
    """
    known = {setting.name: setting for setting in settings()}
    problems: list[str] = []
    raw: dict[str, tuple[object, str]] = {}  # a later source replaces an earlier one
    raw.update(_read_toml(toml, known, problems))
    raw.update(_read_environment(environment or {}, known, problems))
    for name, value in (arguments or {}).items():
        raw[name] = (value, f"command line {known[name].flag}".rstrip())

    values: dict[str, dict[str, object]] = {section: {} for section in _SECTIONS}
    for name, (value, origin) in raw.items():
        setting = known[name]
        try:
            converted = msgspec.convert(value, setting.type, strict=isinstance(value, bool))
        except msgspec.ValidationError as error:
            shown = "(hidden)" if setting.secret else repr(value)
            problems.append(f"{name} = {shown} ({origin}): {str(error)[0].lower()}{str(error)[1:]}")
            continue
        low = setting.at_least
        if low is not None and converted is not None and not low <= converted < float("inf"):
            problems.append(f"{name} = {converted!r} ({origin}): must be at least {low:g}")
            continue
        values[setting.section][setting.field] = converted

    origins = {name: origin for name, (_, origin) in raw.items()}
    config = Config(**{name: cls(**values[name]) for name, cls in _SECTIONS.items()}, origins=origins)
    problems.extend(broken_rules(config))
    if problems:
        raise ConfigError(problems)
    return config


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


def nearest(name: str, known: list[str]) -> str:
    """End of a message about an unknown name: the nearest known one, if any is near."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _value(config: Config, name: str) -> object:
    section, _, field_name = name.partition(".")
    return getattr(getattr(config, section), field_name)


def _is_endpoint(text: str) -> bool:
    """A first look only: `deadpool.membership` reads endpoints for good."""
    return re.fullmatch(r"(https?://)?(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\],]+)(:\d{1,5})?/?", text) is not None


def _read_toml(
    path: Path | None, known: Mapping[str, Setting], problems: list[str]
) -> dict[str, tuple[object, str]]:
    if path is None:
        return {}
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        problems.append(f"configuration file {path}: {error}")
        return {}
    found: dict[str, tuple[object, str]] = {}
    for section, table in tables.items():
        if section not in _SECTIONS:
            problems.append(f"{path}: unknown section [{section}]{nearest(section, list(_SECTIONS))}")
            continue
        if not isinstance(table, dict):
            problems.append(f"{path}: {section} must be a table")
            continue
        allowed = [s.field for s in known.values() if s.section == section and not s.command_line_only]
        for key, value in table.items():
            origin = f"{path} [{section}] {key}"
            if key not in allowed:
                problems.append(f"{origin}: unknown key{nearest(key, allowed)}")
                continue
            found[f"{section}.{key}"] = (value, origin)
    return found


def _read_environment(
    environment: Mapping[str, str], known: Mapping[str, Setting], problems: list[str]
) -> dict[str, tuple[object, str]]:
    by_name = {s.environment_name: s for s in known.values() if not s.command_line_only}
    prefixes = tuple(f"{ENVIRONMENT_PREFIX}{section}_".upper() for section in _SECTIONS)
    found: dict[str, tuple[object, str]] = {}
    for name, text in sorted(environment.items()):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        setting = by_name.get(name)
        if setting is not None:
            value: object = tuple(filter(None, text.split(","))) if setting.type == tuple[str, ...] else text
            found[setting.name] = (value, f"environment {name}")
        elif name.startswith(prefixes) or difflib.get_close_matches(name, by_name, n=1, cutoff=0.9):
            # Other names of ours (DEADPOOL_NO_SKIP) are no settings; one that nearly is a setting is a slip.
            problems.append(f"environment {name}: unknown setting{nearest(name, list(by_name))}")
    return found
