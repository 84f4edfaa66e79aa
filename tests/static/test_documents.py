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
from deadpool.cli import main as cli
from deadpool.config import Setting, settings
from deadpool.errors import ExitCode
from deadpool.report import JobStatus, Report

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "plugins" / "README.md",
]
BLOCK = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def commands_in(path: Path) -> list[list[str]]:
    """The commands of a document's shell blocks, continued lines joined, comments dropped."""
    lines = []
    for block in BLOCK.findall(path.read_text(encoding="utf-8")):
        lines += block.replace("\\\n", " ").splitlines()
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    return [command for command in words if command]


def options_of(verb: str) -> set[str]:
    group: Any = typer.main.get_command(cli._app)
    assert verb in group.commands, f"there is no `deadpool {verb}`"
    return {"--help"} | {name for parameter in group.commands[verb].params for name in parameter.opts}


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
        known = options_of(command[1])
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


def test_versions_agree() -> None:
    declared = re.search(
        r'^    version="([^"]+)"', (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert declared
    assert declared.group(1) == deadpool.__version__
    assert f"## {deadpool.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_this_python_is_one_that_setup_admits() -> None:
    assert 'python_requires=">=3.11"' in (ROOT / "setup.py").read_text(encoding="utf-8")
    assert sys.version_info >= (3, 11)
