"""What the plugin is told: the version of DeepSpeed, and the section "deadpool" of its configuration."""

from __future__ import annotations

import datetime
import difflib
import json
import re
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deadpool.config import settings as job_settings
from deadpool.errors import ConfigError, IntegrationError

SECTION = "deadpool"
OLDEST, TOO_NEW = (0, 19), (0, 20)  # the private attributes that leftovers.py names were read in 0.19.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The section's keys.

    Args:
        collective_timeout_s: timeout of a single collective, as for `deadpool.init`. None: the job's.
    """

    collective_timeout_s: float | None = None

    def join(self, init: Callable[..., None]) -> None:
        """Call `init` unless the script has joined already.

        Raises:
            ConfigError: it has joined, without this section's timeout.
        """
        if self.collective_timeout_s is None:
            if not dist.is_initialized():
                init()
        elif dist.is_initialized():
            raise ConfigError(
                [
                    f"{SECTION}.collective_timeout_s: the script has joined the job before "
                    "deepspeed.initialize (deadpool.init, init_distributed, ...); give it to "
                    "deadpool.init(timeout=...)"
                ]
            )
        else:
            init(timeout=datetime.timedelta(seconds=self.collective_timeout_s))


def check_version(version: str) -> None:
    """Refuse a DeepSpeed whose insides are not known.

    Raises:
        IntegrationError: names the range.
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not OLDEST <= numbers < TOO_NEW:
        raise IntegrationError(
            f"DeepSpeed {version} is not supported: the plugin resets and restores private state of "
            "DeepSpeed, and knows that of >=0.19,<0.20"
        )


def split_config(arguments: MutableMapping[str, Any]) -> Settings:
    """Take the section "deadpool" out of the configuration that `deepspeed.initialize` is given.

    Args:
        arguments: of `deepspeed.initialize`, by name. If there is a section, the configuration is
            replaced by a copy without it; the caller's own is not changed.

    Raises:
        ConfigError: unknown keys or wrong values; lists all.
    """
    options: Any = arguments.get("args")
    named = arguments.get("config") or arguments.get("config_params")
    given = named or getattr(options, "deepspeed_config", None)
    config = _read(given)
    if SECTION not in config:
        return Settings()
    rest = {key: value for key, value in config.items() if key != SECTION}
    arguments["config"] = rest
    arguments.pop("config_params", None)
    if not named:
        options.deepspeed_config = None  # DeepSpeed refuses to be given two
    return _parse(config[SECTION])


def _read(given: Any) -> dict[str, Any]:
    """The configuration as a dict; empty where DeepSpeed itself will say what is wrong."""
    if isinstance(given, dict):
        return given
    if isinstance(given, str | Path) and Path(given).is_file():
        try:
            config = json.loads(Path(given).read_text(encoding="utf-8"))
        except ValueError:
            return {}
        return config if isinstance(config, dict) else {}
    return {}


def _parse(section: Any) -> Settings:
    if not isinstance(section, dict):
        raise ConfigError([f"{SECTION}: must be an object with keys, it is {section!r}"])
    known = {field.name for field in fields(Settings)}
    problems = [_explain(key, known) for key in section if key not in known]
    timeout_s = section.get("collective_timeout_s")
    if timeout_s is not None and (
        isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or timeout_s <= 0
    ):
        problems.append(f"{SECTION}.collective_timeout_s: must be a positive number, it is {timeout_s!r}")
    if problems:
        raise ConfigError(problems)
    return Settings(collective_timeout_s=timeout_s)


def _explain(key: str, known: set[str]) -> str:
    flags = {setting.field: setting.flag for setting in job_settings() if setting.flag}
    if key in flags:
        return (
            f"{SECTION}.{key}: a setting of the whole job, which runs before the script; "
            f"give {flags[key]} to deadpool run"
        )
    near = difflib.get_close_matches(key, [*known, *flags], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{SECTION}.{key}: unknown key{hint} (known: {', '.join(sorted(known))})"
