"""`deadpool`: the commands and their exit codes. Commands are imported when they are called, never torch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

import deadpool
from deadpool.cli.options import CONTEXT_SETTINGS, with_run_options
from deadpool.cli.slurm.commands import app as slurm_app
from deadpool.config import Config
from deadpool.errors import ConfigError, DeadPoolError, ExitCode, IntegrationError, StoreUnavailable
from deadpool.outlet import end_process

_app = typer.Typer(
    name="deadpool",
    help="Hot-swap fault tolerance for torch.distributed training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def app() -> NoReturn:
    """Entry point of the console script and of `python -m deadpool`."""
    end_process(_code_of(_app))


def _code_of(command: Callable[[], object]) -> int:
    """Run the command; returns its exit code."""
    try:
        command()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except ConfigError as error:
        for problem in error.problems:
            _complain(problem)
        return int(ExitCode.BAD_INPUT)
    except IntegrationError as error:
        _complain(str(error))
        return int(ExitCode.BAD_INPUT)
    except StoreUnavailable as error:
        _complain(f"control plane unreachable: {error}")
        return int(ExitCode.CONTROL_PLANE_UNREACHABLE)
    except DeadPoolError as error:
        _complain(str(error))
        return int(ExitCode.USER_ERROR)
    return int(ExitCode.FINISHED)


def _complain(text: str) -> None:
    print(f"deadpool: {text}", file=sys.stderr)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"deadpool {deadpool.__version__}")
        raise typer.Exit()


@_app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass  # only carries --version


def _run(config: Config) -> int:
    """Run a training script on N active hosts with S spares."""
    from deadpool.cli.run import run_command

    return run_command(config)


def _verify(config: Config, undisturbed: str | None) -> int:
    """Run a script undisturbed and with injected faults, and compare both bit for bit.

    The last line is `bit-identical to the undisturbed run: yes`, or `no` with the first difference. Exit code
    0 only for yes; 1: something differs; 4: the runs prove nothing (no recovery, injection not fired, ...).
    """
    from deadpool.cli.verify import verify_command

    return verify_command(config, undisturbed)


_UNDISTURBED = inspect.Parameter(
    "undisturbed",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        str | None,
        typer.Option(
            "--undisturbed",
            metavar="DIR",
            help="Keep the undisturbed run here, and take it from here if the same one was made before.",
            show_default=False,
        ),
    ],
)


def _register(name: str, command: Callable[..., Any]) -> None:
    _app.command(name, context_settings=CONTEXT_SETTINGS)(command)


_register("run", with_run_options(_run))
_register("verify", with_run_options(_verify, [_UNDISTURBED]))
_app.add_typer(slurm_app, name="slurm")


@_app.command("status")
def _status(
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="Job id, needless for one job; or RUN of a Slurm job."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; the schema is in the docs.")] = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="Every host and rank, also of a job of more than 64 hosts.")
    ] = False,
    etcd: Annotated[
        str | None, typer.Option("--etcd", help="Endpoints, for a job that was not started on this machine.")
    ] = None,
) -> None:
    """Show the hosts, ranks and protection of a running job."""
    from deadpool.cli.status import status_command

    raise typer.Exit(status_command(job, as_json=as_json, show_all=show_all, etcd=etcd))


@_app.command("inject")
def _inject(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Job id; or RUN of a Slurm job.")],
    spec: Annotated[
        str, typer.Argument(metavar="KIND:rank=R", help="KIND: sigkill, sigstop, host-loss or host-stop.")
    ],
) -> None:
    """Strike a worker or host of a job that runs on this machine, now."""
    from deadpool.cli.inject import inject_running_job

    print(inject_running_job(job, spec))


@_app.command("readmit")
def _readmit(
    host: Annotated[str, typer.Argument(metavar="HOST", help="Host name, as `deadpool status` shows it.")],
    job: Annotated[
        str | None, typer.Option("--job-id", help="Needless for one job; RUN for a Slurm job.")
    ] = None,
    etcd: Annotated[
        str | None, typer.Option("--etcd", help="Endpoints, for a job that was not started on this machine.")
    ] = None,
) -> None:
    """Take a quarantined host back into a running job, once it is mended."""
    from deadpool.cli.readmit import readmit_host

    print(readmit_host(host, job, etcd))


@_app.command("doctor")
def _doctor(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Folder that `deadpool slurm prepare` printed.")
    ] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Check a running Slurm allocation.")] = False,
    job: Annotated[str | None, typer.Option("--job", help="Slurm's job id; needless inside the job.")] = None,
) -> None:
    """Check what a job stands on, and say what to change. Code 0: nothing."""
    from deadpool.cli.doctor import doctor_command

    if not slurm:
        raise ConfigError(["give --slurm: there is nothing else to check yet"])
    raise typer.Exit(doctor_command(run, job))
