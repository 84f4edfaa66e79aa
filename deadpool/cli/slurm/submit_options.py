"""What a job was given on sbatch's command line or in its script, to be asked for once more."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_NAMES = {
    "TimeLimit": "--time",
    "Partition": "--partition",
    "Account": "--account",
    "QOS": "--qos",
    "Reservation": "--reservation",
    "Features": "--constraint",
    "MinMemoryNode": "--mem",
    "MinMemoryCPU": "--mem-per-cpu",
}

# `gres:gpu:8` up to Slurm 23.02, `cpu=7,gres/gpu:a100=8` and mixtures of both later: name, type, count.
_TRES = re.compile(r"(?:gres[:/])?([a-z_]+)(?::([a-zA-Z_]\w*))?[:=](\d+)")


def submit_options(shown: Mapping[str, str], n_nodes: int) -> tuple[str, ...]:
    """Options for sbatch, as a script does not repeat its command line, and for salloc, which has no script.

    Args:
        shown: what scontrol shows of the job.
        n_nodes: of the job.
    """
    names = dict(_NAMES)
    if shown.get("TimeMin"):  # Slurm may have cut the limit down for this submission
        del names["TimeLimit"]
    memory = _TRES.search(shown.get("MemPerTres", ""))
    if memory is not None:  # Slurm then shows a MinMemoryNode of 0, and takes only one of the three
        del names["MinMemoryNode"], names["MinMemoryCPU"]
    return (
        *(f"{option}={shown[key]}" for key, option in names.items() if shown.get(key)),
        *([f"--mem-per-gpu={memory[3]}M"] if memory is not None else []),
        *(["--exclusive"] if shown.get("OverSubscribe") == "NO" else []),
        *_cpus_and_gpus(shown, n_nodes),
    )


def _cpus_and_gpus(shown: Mapping[str, str], n_nodes: int) -> Iterator[str]:
    cpus = shown.get("CPUs/Task", "1")
    for name, kind, count in _TRES.findall(shown.get("TresPerTask", "")):
        if name == "cpu":
            cpus = count
        elif name == "gpu":
            yield f"--gpus-per-task={_typed(kind, count)}"
    if cpus != "1":  # shown also where nothing was asked for, and asked for, it would narrow the steps
        yield f"--cpus-per-task={cpus}"
    per_node = _TRES.findall(shown.get("TresPerNode", ""))
    if per_node:
        yield "--gres=" + ",".join(f"{name}:{_typed(kind, count)}" for name, kind, count in per_node)
    for name, kind, count in _TRES.findall(shown.get("TresPerJob", "")):
        if name == "gpu" and int(count) % n_nodes == 0:
            yield f"--gpus-per-node={_typed(kind, str(int(count) // n_nodes))}"


def _typed(kind: str, count: str) -> str:
    return f"{kind}:{count}" if kind else count
