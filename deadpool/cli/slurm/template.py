"""The job templates: one file, whose command is exchanged."""

from __future__ import annotations

from importlib.resources import files

_BEGIN, _END = "TRAIN=(\n", "\n)\n"

_COMMANDS = {
    "megatron": """\
  examples/megatron_gpt.py
  --optimizer distributed
  --steps 100000""",
    "deepspeed": """\
  examples/deepspeed_gpt.py
  --stage 3
  --steps 100000""",
}


def job_template(framework: str = "") -> str:
    """The text of a batch script.

    Args:
        framework: "megatron", "deepspeed", or "" for plain PyTorch. Only the training command differs.
    """
    text = (files("deadpool.cli.slurm") / "deadpool.sbatch").read_text(encoding="utf-8")
    if not framework:
        return text
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    return f"{before}{begin}{_COMMANDS[framework]}{end}{after}"
