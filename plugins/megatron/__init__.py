"""Hot swap for megatron-core: loops of one's own, and Megatron-LM's `pretrain`.

A loop on megatron-core gets its step protected:

    from deadpool.plugins import megatron
    train_step = megatron.wrap_step(train_step, model, optimizer, opt_param_scheduler, data=loader)

Megatron-LM gets one changed line in pretrain_gpt.py, before `pretrain` is called:

    pretrain = megatron.wrap_pretrain(pretrain)

Any dimension may lose a host: data, tensor, pipeline, with virtual stages too. docs/megatron.md says what is
captured and what is refused.

Modules: `versions` which megatron-core; `refusals` what cannot be protected; `objects` model, optimizer and
scheduler; `arena` one buffer for all shards; `adapter` the state; `reset` what an aborted iteration leaves;
`structure` caches that must travel; `step` wrap_step; `pretrain` wrap_pretrain.
"""

from __future__ import annotations

from deadpool.plugins.megatron.versions import check_installed

check_installed()

# After the check: these import megatron.
from deadpool.plugins.megatron.pretrain import wrap_pretrain  # noqa: E402
from deadpool.plugins.megatron.step import wrap_step  # noqa: E402

__all__ = ["wrap_pretrain", "wrap_step"]
