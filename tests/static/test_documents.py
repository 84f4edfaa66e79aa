"""README and docs say what the code does."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

import deadpool
from deadpool import errors, events
from deadpool.cli import main as cli
from deadpool.config import Setting, settings
from deadpool.errors import ExitCode
from deadpool.events import EVENTS
from deadpool.report import JobStatus, Report

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "plugins" / "README.md",
    ROOT / "slurm" / "README.md",
]
USER_DOCUMENTS = [path for path in DOCUMENTS if "adr" not in path.parts and path.name != "CONTRIBUTING.md"]
OTHER_PROGRAMS = {"--no-build-isolation"} | {
    *("--tp", "--pp", "--vpp", "--dtype", "--overlap", "--optimizer", "--steps"),  # examples/megatron_gpt.py
    *("--inprocess-restart", "--async-save", "--dataloader-type", "--use-torch-fsdp2"),  # Megatron-LM
    *("--optimizer-cuda-graph", "--hybrid-context-parallel", "--load", "--save"),
}
SLURM_OPTIONS = {
    "--export",
    "--gpus",
    "--jobs",
    "--no-kill",
    "--no-requeue",
    "--nodes",
    "--signal",
    "--steps",
}
"""Flags that documents name and that are not ours."""

TEST_SWITCHES = "DEADPOOL_NO_SKIP"
"""Variables that only the tests read."""

NO_TROUBLE = {"run.finished", "view.adopted", "store.reachable", "snapshot.protected", "checkpoint.complete"}
"""Console lines that need no advice."""

BLOCK = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def commands_in(path: Path) -> list[list[str]]:
    """The commands of a document's shell blocks, continued lines joined, comments dropped."""
    lines = []
    for block in BLOCK.findall(path.read_text(encoding="utf-8")):
        lines += block.replace("\\\n", " ").splitlines()
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    return [command for command in words if command]


def command_group() -> Any:
    return typer.main.get_command(cli._app)


def options_of(words: list[str]) -> set[str]:
    """Options of the command that `words` begin with, such as `status` or `slurm grow`."""
    command = command_group()
    while hasattr(command, "commands"):
        assert words and words[0] in command.commands, f"there is no `deadpool {shlex.join(words)}`"
        command, words = command.commands[words[0]], words[1:]
    return all_options(command)


def all_options(command: Any) -> set[str]:
    """Options of a command, and of those below it."""
    below = set().union(*map(all_options, getattr(command, "commands", {}).values()))
    own = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    return {"--help"} | own | below


def reported_fields() -> set[str]:
    schemas = [msgspec.json.schema_components([each])[1] for each in (Report, JobStatus)]
    return {name for parts in schemas for part in parts.values() for name in part["properties"]}


def event_fields() -> set[str]:
    return {"monotonic_s", "wall_s"} | set(re.findall(r"\w+_s\b", " ".join(EVENTS.values())))


def is_named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=is_named)
def test_make_targets_in_documents_exist(document: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {command[1] for command in commands_in(document) if command[0] == "make" and len(command) > 1}
    named |= set(re.findall(r"`make ([\w-]+)`", document.read_text(encoding="utf-8")))
    assert named <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=is_named)
def test_deadpool_commands_in_documents_exist_with_their_options(document: Path) -> None:
    for command in commands_in(document):
        if command[0] != "deadpool" or len(command) < 2:
            continue
        known = options_of(command[1:])
        for word in command[2:]:
            if word.endswith(".py"):  # from here on it belongs to the script
                break
            if word.startswith("--"):
                assert word.split("=")[0] in known, f"{word} in: {shlex.join(command)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=is_named)
def test_links_in_documents_lead_somewhere(document: Path) -> None:
    links = [link for link in LINK.findall(document.read_text(encoding="utf-8")) if "://" not in link]
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=is_named)
def test_files_named_in_commands_exist(document: Path) -> None:
    named = {word for command in commands_in(document) for word in command if word.startswith("examples/")}
    assert all((ROOT / name).is_file() for name in named), named


def test_every_exit_code_is_documented_and_no_other() -> None:
    table = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert documented == {int(code) for code in ExitCode}


def test_slurm_readme_shows_every_exit_code() -> None:
    table = (ROOT / "slurm" / "README.md").read_text(encoding="utf-8")
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == {*map(int, ExitCode)}


def shown(value: object) -> str:
    return "" if value in ("", (), None) else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def configuration_row(setting: Setting) -> str:
    name = f"`{setting.section}.{setting.field}`" + (" *" if setting.command_line_only else "")
    flag = f"`{setting.flag}`" if setting.flag else ""
    default = "must be given" if setting.is_required else shown(setting.default)
    return f"| {name} | {flag} | {default} | {setting.doc} |"


def test_every_setting_is_documented_with_its_flag_and_default() -> None:
    documented = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8").splitlines()
    rows = [configuration_row(setting) for setting in settings()]
    assert [line for line in documented if line.startswith("| `")] == rows, "\n".join(rows)


@pytest.mark.parametrize("outermost", [Report, JobStatus])
def test_every_field_of_what_is_handed_out_is_documented(outermost: type[msgspec.Struct]) -> None:
    text = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    _, parts = msgspec.json.schema_components([outermost])
    fields = {name for part in parts.values() for name in part["properties"]}
    assert {name for name in fields if f"`{name}`" not in text} == set()


def sources() -> str:
    files = [*(ROOT / "deadpool").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def inline_code(path: Path) -> list[str]:
    """What stands between single backticks, outside of blocks."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("document", USER_DOCUMENTS, ids=is_named)
def test_flags_in_running_text_exist(document: Path) -> None:
    known = set().union(*map(all_options, command_group().commands.values()))
    known |= OTHER_PROGRAMS | SLURM_OPTIONS
    named = {word for code in inline_code(document) for word in re.findall(r"(?<![\w-])--[a-z][\w-]*", code)}
    assert named - known == set()


@pytest.mark.parametrize("document", USER_DOCUMENTS, ids=is_named)
def test_time_limits_and_variables_in_running_text_exist(document: Path) -> None:
    fields = {setting.field for setting in settings()} | reported_fields() | event_fields()
    variables = {setting.environment_name for setting in settings()} | set(
        re.findall(r"DEADPOOL_[A-Z_]+", sources() + (ROOT / "setup.py").read_text() + TEST_SWITCHES)
    )
    for code in inline_code(document):
        if re.fullmatch(r"[a-z]+(_[a-z0-9]+)*_s", code):
            assert code in fields, code
        for variable in re.findall(r"DEADPOOL_[A-Z][A-Z_]*[A-Z]", code):
            assert variable in variables, variable


def test_every_event_is_documented_with_its_fields_and_no_other() -> None:
    text = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    rows = [f"| `{name}` | {what} |" for name, what in EVENTS.items()]
    section = text.partition("## Events")[2].partition("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("| `")] == rows, "\n".join(rows)


def test_every_event_of_the_catalogue_is_emitted_somewhere() -> None:
    files = [path for path in (ROOT / "deadpool").rglob("*.py") if path.name != "events.py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files if "testing" not in path.parts)
    families = set(re.findall(r'f"([a-z]+)\.\{', text))  # emitted under a name that is put together
    assert [name for name in EVENTS if f'"{name}"' not in text and name.split(".")[0] not in families] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=is_named)
def test_events_named_in_documents_exist(document: Path) -> None:
    families = {name.partition(".")[0] for name in EVENTS}
    named = {code for code in inline_code(document) if re.fullmatch(r"[a-z]+\.[a-z_]+", code)}
    known = EVENTS.keys() | {setting.name for setting in settings()}
    unknown = {name for name in named if name.partition(".")[0] in families and name not in known}
    assert {name for name in unknown if not name.endswith((".py", ".md", ".json", ".jsonl"))} == set()


def error_classes() -> list[type[errors.DeadPoolError]]:
    named = [each for each in vars(errors).values() if isinstance(each, type)]
    return [each for each in named if issubclass(each, errors.DeadPoolError)]


def test_every_error_has_a_row_in_troubleshooting_and_no_other_has_one() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    section = text.partition("## Errors by name")[2]
    documented = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert documented == {each.__name__ for each in error_classes() if not each.__subclasses__()}


def test_the_tree_of_errors_is_drawn_whole() -> None:
    drawn = set(re.findall(r"\w+", errors.__doc__ or ""))
    assert {each.__name__ for each in error_classes()} <= drawn


def test_every_code_of_a_failed_job_has_a_row_in_troubleshooting() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = " ".join(re.findall(r"^## .*", text, re.MULTILINE))
    first_cells = " ".join(re.findall(r"^\| ([\d, ]+) \|", text, re.MULTILINE))
    codes = {int(code) for code in re.findall(r"\d+", headings + first_cells)}
    assert codes == {int(code) for code in ExitCode if code}


def test_console_lines_that_report_trouble_are_in_troubleshooting() -> None:
    """Each begins with fixed words, or has some behind its first field: those have to be found there."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    trouble = {name: line for name, line in events._CONSOLE.items() if name not in NO_TROUBLE}
    missing = {name: line for name, line in trouble.items() if fixed_words(line) not in text}
    assert missing == {}


def fixed_words(template: str) -> str:
    """The longest stretch of a console line before a colon that holds no field."""
    stretches = re.split(r"\{[^}]*\}", template)
    return max((stretch.split(":")[0].strip(" ();") for stretch in stretches), key=len)


def test_documents_named_in_sources_exist() -> None:
    files = [ROOT / "setup.py", *(ROOT / "deadpool").rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files if "plugins" not in path.parts)
    named = set(re.findall(r"docs/[\w/-]+\.md", text))
    assert {name for name in named if not (ROOT / name).is_file()} == set()


def test_extras_in_documents_are_those_of_the_package() -> None:
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    table = text.partition("| Extra | Brings |")[2].partition("\n\n")[0]
    documented = set(re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in table.splitlines()[2:])))
    declared = (
        (ROOT / "setup.py").read_text(encoding="utf-8").partition("extras_require={")[2].partition("}")[0]
    )
    assert documented == set(re.findall(r'"(\w+)":', declared))


def test_versions_agree() -> None:
    declared = re.search(
        r'^    version="([^"]+)"', (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert declared
    assert declared.group(1) == deadpool.__version__
    assert f"## {deadpool.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_range_of_torch_in_documents_is_that_of_the_package() -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    declared = re.search(r'"torch>=2\.(\d+),<2\.(\d+)"', setup)
    assert declared
    accepted = f"2.{declared.group(1)} to 2.{int(declared.group(2)) - 1} are accepted"
    assert accepted in (ROOT / "README.md").read_text(encoding="utf-8")


def test_this_python_is_one_that_setup_admits() -> None:
    assert 'python_requires=">=3.11"' in (ROOT / "setup.py").read_text(encoding="utf-8")
    assert sys.version_info >= (3, 11)
