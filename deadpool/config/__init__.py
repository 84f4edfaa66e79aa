"""Configuration of a job: one frozen dataclass per component, read once, the origin of every value kept.

Precedence: default < TOML < environment < command line. A field `progress_timeout_s` of section `liveness`
is `progress_timeout_s` under `[liveness]` in TOML, `DEADPOOL_LIVENESS_PROGRESS_TIMEOUT_S` in the environment
and, where its declaration names a flag, `--progress-timeout-s` on the command line. Flags and help texts are
declared here, once; `deadpool.cli.options` makes the command line from them.

Every problem is found before the first one is reported. Rules over several settings live in `rules.py` and
nowhere else.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from deadpool.config.rules import broken_rules
from deadpool.errors import ConfigError

ENVIRONMENT_PREFIX = "DEADPOOL_"
DEFAULT_ORIGIN = "default"


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
    grow_command: str = _setting(
        "", "Command that brings another host when no spare is left.", flag="--grow-command"
    )
    suspect_s: float = _setting(
        2.0, "How long a fault waits for a confirmed death before all members are tried again.", at_least=0
    )
    start_timeout_s: float = _setting(300.0, "Workers import torch and register.", at_least=0)
    forming_timeout_s: float = _setting(
        600.0,
        "All hosts register; then, again, scripts reach `wrap` and snapshot 0 is complete.",
        flag="--forming-timeout-s",
        at_least=0,
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
    first_step_timeout_s: float = _setting(
        180.0,
        "The same for the first step of a process, which compiles and connects.",
        flag="--first-step-timeout-s",
        at_least=0,
    )
    collective_report_s: float = _setting(
        10.0,
        "Wait in one collective after which hosts compare what their ranks have called.",
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
    grace_s: float = _setting(
        10.0, "Time to write the newest snapshot after SIGTERM.", flag="--grace-s", at_least=0
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

    def describe_limits(self) -> str:
        """Every time limit in the order in which they fire, so that a message about one can be placed."""
        limits = [
            (getattr(getattr(self, setting.section), setting.field), setting.field)
            for setting in settings()
            if setting.field.endswith("_s") and not setting.field.endswith("_bytes_s")  # that is a rate
        ]
        return ", ".join(f"{name.removesuffix('_s')} {value:g} s" for value, name in sorted(limits))

    def without_secrets(self) -> Config:
        """For processes that need none of them; see also `hide_secrets`."""
        return replace(self, membership=replace(self.membership, password=""))

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


def hide_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for processes that need no secrets: workers run the user's code, and its children."""
    secret = {setting.environment_name for setting in settings() if setting.secret}
    return {name: value for name, value in environment.items() if name not in secret}


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


def nearest(name: str, known: list[str]) -> str:
    """End of a message about an unknown name: the nearest known one, if any is near."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


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
