"""Tables from the runs below a folder: OUT/<round>/<run>/{run.json,events.jsonl,usage.json,*.log}.

Ratios are to the plain runs of the same round, the one before and the one after. What the figures of one run
mean stands in measures.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configurations import baseline_of
from measures import Rates, Recovery, Run, committed_steps, median, rates_of, read_run, recovery_of

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run beside the plain runs of its round."""

    run: Run
    rates: Rates
    step_ratio: float | None
    worker_cpu_ratio: float | None
    job_cpu_ratio: float | None
    recovery: Recovery | None


def compare(runs: list[Run]) -> list[Row]:
    """Rows of one round, in the order in which they ran."""
    runs = sorted(runs, key=lambda run: float(run.facts["t0"]))
    rates = [rates_of(run) for run in runs]
    rows = []
    for index, run in enumerate(runs):
        baseline = baseline_of(run.configuration)
        plain = [at for at, other in enumerate(runs) if other.configuration == baseline and at != index]
        near = [at for at in plain if at < index][-1:] + [at for at in plain if at > index][:1]
        beside = [] if run.configuration == baseline else [rates[at] for at in near]
        rows.append(
            Row(
                run=run,
                rates=rates[index],
                step_ratio=_ratio(rates[index].step_s, [each.step_s for each in beside]),
                worker_cpu_ratio=_ratio(rates[index].worker_cpu_s, [each.worker_cpu_s for each in beside]),
                job_cpu_ratio=_ratio(rates[index].job_cpu_s, [each.job_cpu_s for each in beside]),
                recovery=recovery_of(run),
            )
        )
    return rows


def _ratio(value: float | None, beside: list[Any]) -> float | None:
    if value is None or not beside or None in beside:
        return None
    return value / (sum(beside) / len(beside))


def print_tables(rows: list[Row]) -> None:
    """Everything, as markdown."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.run.configuration, []).append(row)
    undisturbed: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        if row.run.configuration == baseline_of(row.run.configuration):
            undisturbed[(row.run.configuration, int(row.run.facts["steps"]))] = row.run.digests
    print(
        "| configuration | runs | step s | ratio to plain | CPU of a rank | CPU of all | committed "
        "| lost steps | (i) s | (ii) s | (iii) s | same final bits |\n|" + "---|" * 12
    )
    for name, group in by_name.items():
        recoveries = [row.recovery for row in group if row.recovery]
        cells = [
            name,
            str(len(group)),
            f"{median(row.rates.step_s for row in group):.3f}",
            spread(row.step_ratio for row in group),
            spread(row.worker_cpu_ratio for row in group),
            spread(row.job_cpu_ratio for row in group),
            ", ".join(committed_steps(row.run) for row in group if row.run.own_events) or "-",
            ", ".join(str(each.lost_steps) for each in recoveries) or "-",
            spread(each.first_s for each in recoveries),
            spread(each.beyond_s for each in recoveries),
            spread(each.full_s for each in recoveries),
            _same_bits(group, undisturbed),
        ]
        print("| " + " | ".join(cells) + " |")
    print("\nAfter the SIGKILL: when each phase ended, seconds, median over runs\n")
    for name, group in by_name.items():
        marks = [row.recovery.marks for row in group if row.recovery]
        names = dict.fromkeys(key for each in marks for key in each)
        parts = [f"{key} {median(each[key] for each in marks if key in each):.3f}" for key in names]
        if parts:
            print(f"- {name}: " + " -> ".join(parts))
    _print_usage(by_name)
    _print_memory(by_name)


def _same_bits(group: list[Row], undisturbed: dict[tuple[str, int], list[str]]) -> str:
    answers = []
    for row in group:
        expected = undisturbed.get((baseline_of(row.run.configuration), int(row.run.facts["steps"])))
        if row.recovery and expected and row.run.digests:
            answers.append(row.run.digests == expected)
    return f"{sum(answers)}/{len(answers)}" if answers else "-"


def _print_usage(by_name: dict[str, list[Row]]) -> None:
    print("\nPer process, before the fault (PSS: a page shared by n processes counts as one nth)\n")
    print("| configuration | process | MiB | CPU s per minute | wakeups per s |\n|---|---|---|---|---|")
    for name, group in by_name.items():
        lines: dict[str, list[tuple[float, float, float]]] = {}
        for row in group:
            if len(row.run.usage) < 2:
                continue
            begin, end = row.run.usage[0], row.run.usage[-1]
            seconds = end["t"] - begin["t"]
            stepping = _stepping(row.run)
            for pid, usage in end["processes"].items():
                before = begin["processes"].get(pid)
                if before is None:
                    continue
                role = "spare worker" if usage["role"] == "worker" and pid not in stepping else usage["role"]
                cpu = 60 * (usage["cpu_s"] - before["cpu_s"]) / seconds
                wakeups = (usage["wakeups"] - before["wakeups"]) / seconds
                lines.setdefault(role, []).append((usage["pss_bytes"] / MIB, cpu, wakeups))
        for role, values in sorted(lines.items()):
            columns = [median(column) for column in zip(*values, strict=True)]
            print(f"| {name} | {role} | {columns[0]:.0f} | {columns[1]:.2f} | {columns[2]:.0f} |")


def _print_memory(by_name: dict[str, list[Row]]) -> None:
    print(
        "\nMemory of an active host: agent and worker, less the worker of the plain run, beside its banks\n"
    )
    print("| configuration | banks MiB | beyond plain MiB | ratio |\n|---|---|---|---|")
    for name, group in by_name.items():
        plain_mib = median(_worker_mib(by_name.get(baseline_of(name), [])))
        beyond = [mib - plain_mib for row in group for mib in _host_mib(row.run)]
        banks_mib = median(_banks_mib(row.run) for row in group)
        if beyond and banks_mib == banks_mib and plain_mib == plain_mib:
            print(f"| {name} | {banks_mib:.0f} | {median(beyond):.0f} | {median(beyond) / banks_mib:.3f} |")


def _stepping(run: Run) -> set[str]:
    """Pids of the processes that ran steps before the fault."""
    return {str(event["pid"]) for event in run.steps if event["t"] < run.fault_s}


def _worker_mib(group: list[Row]) -> list[float]:
    return [
        usage["pss_bytes"] / MIB
        for row in group
        for pid, usage in (row.run.usage[-1]["processes"] if row.run.usage else {}).items()
        if pid in _stepping(row.run)
    ]


def _host_mib(run: Run) -> list[float]:
    """Agent and worker of each active host of DeadPool."""
    processes = run.usage[-1]["processes"] if run.usage else {}
    found = []
    for pid in _stepping(run):
        agent = processes.get(str(processes.get(pid, {}).get("parent")), {})
        if agent.get("role") == "agent":
            found.append((processes[pid]["pss_bytes"] + agent["pss_bytes"]) / MIB)
    return found


def _banks_mib(run: Run) -> float:
    """What DeadPool itself says that a host needs: two banks for its rank, two for the one it holds."""
    said = [
        float(number) * (1024 if unit == "GiB" else 1)
        for path in run.folder.glob("job.log")
        for number, unit in re.findall(r"host memory on \S+: ([\d.]+) (MiB|GiB) needed", path.read_text())
    ]
    return median(said)


def spread(values: Iterable[float | None]) -> str:
    """Median, and the range if there are several."""
    listed = [value for value in values if value is not None]
    if not listed:
        return "-"
    text = f"{median(listed):.3f}"
    return text if len(listed) == 1 else f"{text} [{min(listed):.3f}..{max(listed):.3f}]"


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: analyse.py OUT\n\n{__doc__}")
    rows: list[Row] = []
    for folder in sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir()):
        runs = [run for path in sorted(folder.iterdir()) if (run := read_run(path)) is not None]
        rows += compare(runs)
    if not rows:
        raise SystemExit(f"no runs below {sys.argv[1]}")
    print_tables(rows)


if __name__ == "__main__":
    main()
