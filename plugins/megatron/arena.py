"""One buffer for the masters and moments of an optimizer, so that one copy moves a rank's whole shard.

Megatron cuts a rank's shard along parameters: hundreds of small tensors, three for each. They are moved once
into one flat buffer, and every tensor then points into it. No object is exchanged and no bit changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")


class Arena:
    """`[masters | exp_avg | exp_avg_sq]` of one optimizer, float32.

    Creates moments that the first step would have created, with its zeros. While a tensor moves, both copies
    of it exist; nothing else is doubled.

    Args:
        params: masters in the order of the optimizer's groups.
        state: the optimizer's state; gets views of the buffer.
    """

    def __init__(self, params: Sequence[torch.Tensor], state: Any) -> None:
        self._params = tuple(params)
        self._state = state
        count = sum(param.numel() for param in params)
        device = params[0].device if params else torch.device("cpu")
        self.flat = torch.zeros(3 * count, dtype=torch.float32, device=device)
        self._places: list[tuple[torch.Tensor, int]] = []  # tensor and address that it must keep
        self._move(count)

    def moved_tensor(self) -> str | None:
        """What no longer points into the buffer, or None. Addresses only: 0.2 us each."""
        for index, (tensor, address) in enumerate(self._places):
            if tensor.data_ptr() != address:
                kind = ("master", *MOMENTS)[index % 3]
                return f"{kind} of parameter {index // 3}"
        return None

    def read_steps(self) -> torch.Tensor | None:
        """The step counters that Adam keeps per parameter, or None if it keeps one per group."""
        steps = [self._state[param]["step"] for param in self._params if "step" in self._state[param]]
        return torch.stack([step.detach().cpu() for step in steps]) if steps else None

    def restore_steps(self, stored: torch.Tensor | None) -> None:
        if stored is not None:
            for param, step in zip(self._params, stored, strict=True):
                self._state[param]["step"].copy_(step)

    @torch.no_grad()
    def _move(self, count: int) -> None:
        offset = 0
        for param in self._params:
            size = param.numel()
            views = [
                self.flat[start + offset : start + offset + size].view(param.shape)
                for start in (0, count, 2 * count)
            ]
            views[0].copy_(param.detach())
            param.data = views[0]
            state = self._state[param]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
            for moment, view in zip(MOMENTS, views[1:], strict=True):
                if moment in state:
                    view.copy_(state[moment])
                    state[moment].data = view
                else:
                    state[moment] = view
            self._places += [
                (tensor, view.data_ptr())
                for tensor, view in zip((param, *(state[key] for key in MOMENTS)), views, strict=True)
            ]
            offset += size
