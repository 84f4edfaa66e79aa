"""`deadpool slurm ...`: the commands. Each is carried out by a file of its name."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Annotated

import typer

from deadpool.cli.options import CONTEXT_SETTINGS, with_run_options
from deadpool.config import Config

app = typer.Typer(help="Jobs under Slurm: the template and what it calls.", no_args_is_help=True)

_RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="Folder that `prepare` printed.")]


@app.command("template")
def _template(
    megatron: Annotated[bool, typer.Option("--megatron", help="With a command for Megatron-LM.")] = False,
    deepspeed: Annotated[bool, typer.Option("--deepspeed", help="With a command for DeepSpeed.")] = False,
) -> None:
    """Print a batch script to copy: deadpool slurm template > job.sbatch."""
    from deadpool.cli.slurm.template import job_template

    if megatron and deepspeed:
        raise typer.BadParameter("give --megatron or --deepspeed, not both")
    print(job_template("megatron" if megatron else "deepspeed" if deepspeed else ""), end="")


def _prepare(config: Config, requeue: str, warning_signal: str, grow: bool) -> int:
    """On the batch host: check the allocation, write the run folder, print its path."""
    from deadpool.cli.slurm.prepare import Wishes, prepare

    print(prepare(config, Wishes(requeue=requeue, warning_signal=warning_signal, grow=grow)), flush=True)
    return 0


_PREPARE_OPTIONS = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    for name, default, annotation in (
        (
            "requeue",
            "sbatch",
            Annotated[
                str,
                typer.Option(
                    "--requeue",
                    help="After a warning signal: sbatch (the script again), scontrol (scontrol requeue), "
                    "none, or a command of your own.",
                ),
            ],
        ),
        (
            "warning_signal",
            "TERM",
            Annotated[
                str, typer.Option("--warning-signal", help="What #SBATCH --signal sends: TERM, USR1, ...")
            ],
        ),
        (
            "grow",
            False,
            Annotated[bool, typer.Option("--grow", help="Ask Slurm for another node when no spare is left.")],
        ),
    )
]

app.command("prepare", context_settings=CONTEXT_SETTINGS)(
    with_run_options(_prepare, _PREPARE_OPTIONS, has_control_plane=True)
)


@app.command("host")
def _host(run: _RunDir) -> None:
    """On every node, as the one task of its step: run the node's host."""
    from deadpool.cli.slurm.host import run_host

    raise typer.Exit(run_host(run))


@app.command("wait")
def _wait(
    run: _RunDir,
    pids: Annotated[list[int] | None, typer.Argument(metavar="[PID]...", help="The srun processes.")] = None,
) -> None:
    """On the batch host: wait for the hosts; submit again after a warning; end with the job's code."""
    from deadpool.cli.slurm.wait import wait

    raise typer.Exit(wait(run, pids or []))


@app.command("grow")
def _grow(
    run: _RunDir,
    wait_s: Annotated[
        float, typer.Option("--wait-s", help="How long the node may stay in the queue.")
    ] = 300.0,
) -> None:
    """Bring one more node into the running job, as a spare."""
    from deadpool.cli.slurm.grow import grow

    node = grow(run, wait_s)
    print(
        f"deadpool: node {node} is the job's, and a host is starting there, a spare once `deadpool status "
        f"{run}` shows it; its log is {run / node}-0.log",
        file=sys.stderr,
        flush=True,
    )
