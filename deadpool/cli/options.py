"""The options of a run, made from the declarations in `deadpool.config`: `run` and `verify` accept the same.

Unknown flags are refused, and everything after SCRIPT belongs to the script.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from deadpool.config import DEFAULT_ORIGIN, Config, Setting, load_config, settings
from deadpool.errors import ConfigError, ExitCode
from deadpool.testing.faults import parse_injections

CONTEXT_SETTINGS = {"allow_interspersed_args": False}
"""For typer's `command`: the first positional argument ends the options."""

_SEPARATOR = "__"  # between section and field in the names of generated parameters


def with_run_options(
    handler: Callable[..., int],
    extra: Sequence[inspect.Parameter] = (),
    *,
    has_control_plane: bool = False,
) -> Callable[..., None]:
    """Make a typer command that reads the options of a run and calls `handler(config, **extra values)`.

    Args:
        handler: returns the exit code.
        extra: further options, which `handler` gets by name.
        has_control_plane: `handler` brings its own etcd, so none needs to be named.
    """
    names = [parameter.name for parameter in extra]

    def command(**values: Any) -> None:
        own = {name: values.pop(name) for name in names}
        try:
            code = handler(read_run_config(values, has_control_plane=has_control_plane), **own)
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED  # typer would make it 1
        raise typer.Exit(int(code))

    parameters = [*_option_parameters(), *extra, *_SCRIPT_PARAMETERS]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__name__ = handler.__name__
    command.__doc__ = handler.__doc__
    return command


def read_run_config(
    values: Mapping[str, Any],
    environment: Mapping[str, str] = os.environ,
    *,
    has_control_plane: bool = False,
) -> Config:
    """Configuration of a run from what was given on the command line.

    Args:
        values: generated parameter name -> value; None for what was not given.
        environment: DEADPOOL_* variables.
        has_control_plane: no etcd needs to be named.

    Raises:
        ConfigError: every problem that can be seen before anything is started.
    """
    arguments: dict[str, object] = {}
    for name, value in values.items():
        if value is None:
            continue
        setting = name.replace(_SEPARATOR, ".")
        arguments[setting] = tuple(value.split(",")) if setting == "membership.etcd" else value
    specs = tuple(values.get("run__inject") or ())
    arguments["run.inject"] = specs
    toml = Path(values["run__config_file"]) if values.get("run__config_file") else None
    problems: list[str] = []
    world_size = None
    try:
        config = load_config(toml=toml, environment=environment, arguments=arguments)
    except ConfigError as error:
        problems.extend(error.problems)
    else:
        world_size = config.world_size
        problems.extend(_missing(config, has_control_plane))
    try:
        parse_injections(specs, world_size)
    except ConfigError as error:
        problems.extend(error.problems)
    script = Path(values.get("run__script") or "")
    if not script.is_file():
        problems.append(f"training script {str(script)!r} is not a file")
    if problems:
        raise ConfigError(problems)
    return config


def run_arguments(config: Config, overrides: Mapping[str, object]) -> list[str]:
    """Command line of `deadpool run` that gives `config` again, except for `overrides`.

    Only what came from the command line is repeated: a child process reads the same environment and files.

    Args:
        config: as `read_run_config` made it.
        overrides: `section.field` -> value; None leaves the setting out.
    """
    arguments: list[str] = []
    for setting in settings():
        if not setting.flag:
            continue
        if setting.name in overrides:
            value = overrides[setting.name]
        elif config.origin(setting.name).startswith("command line"):
            value = getattr(getattr(config, setting.section), setting.field)
        else:
            continue
        arguments.extend(_as_arguments(setting, value))
    return [*arguments, config.run.script, *config.run.script_args]


def _missing(config: Config, has_control_plane: bool) -> list[str]:
    problems = [
        f"give {setting.flag}: {setting.doc}"
        for setting in settings()
        if setting.is_required and config.origin(setting.name) == DEFAULT_ORIGIN
    ]
    if not has_control_plane and not config.run.standalone and not config.membership.etcd:
        problems.append(
            "give --standalone to run all hosts on this machine, or --etcd HOST:PORT,... to join a job"
        )
    return problems


def _as_arguments(setting: Setting, value: object) -> list[str]:
    if value is None or value == ():
        return []
    if isinstance(value, bool):
        if value:
            return [setting.flag]
        return [setting.flag.replace("--", "--no-", 1)] if setting.default is True else []
    if setting.name == "membership.etcd" and isinstance(value, tuple):
        return [setting.flag, ",".join(value)]
    if isinstance(value, tuple):
        return [part for item in value for part in (setting.flag, str(item))]
    return [setting.flag, str(value)]


def _option_parameters() -> list[inspect.Parameter]:
    return [_option(setting) for setting in settings() if setting.flag]


def _option(setting: Setting) -> inspect.Parameter:
    """A parameter that is None unless the option was given: defaults are the configuration's affair."""
    shown = setting.default if setting.default not in ("", (), None) else "none"
    if setting.is_required:
        shown = "none, must be given"
    names = [setting.flag]
    if setting.type is bool:
        shown = "yes" if setting.default else "no"
        if setting.default:
            names = [f"{setting.flag}/{setting.flag.replace('--', '--no-', 1)}"]
    kind: Any = setting.type
    if setting.name == "membership.etcd":
        kind = str
    elif kind == tuple[str, ...]:
        kind = list[str]
    elif kind == int | None:
        kind = int
    option = typer.Option(*names, help=f"{setting.doc} [default: {shown}]", show_default=False)
    return inspect.Parameter(
        f"{setting.section}{_SEPARATOR}{setting.field}",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


_SCRIPT_PARAMETERS = (
    inspect.Parameter(
        f"run{_SEPARATOR}script",
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[
            str, typer.Argument(metavar="SCRIPT", help="Training script.", show_default=False)
        ],
    ),
    inspect.Parameter(
        f"run{_SEPARATOR}script_args",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            list[str] | None,
            typer.Argument(metavar="[ARGS]...", help="Arguments of the script.", show_default=False),
        ],
    ),
)
