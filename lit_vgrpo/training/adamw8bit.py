"""bitsandbytes' AdamW with 8-bit moments (arXiv 2110.02861)."""

from __future__ import annotations

from typing import Any

from bitsandbytes.optim import AdamW8bit
from typing_extensions import override

from lit_vgrpo.training.optimizer_state import with_own_settings


class ResumableAdamW8bit(AdamW8bit):
    """AdamW8bit that resumes with its recipe's settings; the library's class runs no load hooks."""

    @override
    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        super().load_state_dict(with_own_settings(self, state_dict), move_to_device)
