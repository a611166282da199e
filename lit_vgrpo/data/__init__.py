"""Prompts in, prompt batches out."""

from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.data.datasets import GroupSampler
from lit_vgrpo.data.module import PromptDataModule
from lit_vgrpo.data.prompts import read_prompts
from lit_vgrpo.data.source import PromptError, PromptSource

__all__ = [
    "GroupSampler",
    "PromptBatch",
    "PromptDataModule",
    "PromptError",
    "PromptSource",
    "read_prompts",
]
