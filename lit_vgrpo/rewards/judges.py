"""Judges whose packages need a separate environment: ``lightning serve-reward NAME --print-setup``."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.pictures import several_pictures_error
from lit_vgrpo.core.pixels import to_pil
from lit_vgrpo.core.ranges import checked
from lit_vgrpo.rewards.base import Reward, RewardError
from lit_vgrpo.system.hub import leave_silent_hub, local_folder

EDIT_CONFIG = "config/EditReward-MiMo-VL-7B-SFT-2508.yaml"
PACKAGES = {"HPSv3": "hpsv3", "DeQA": "accelerate", "EditReward": "EditReward"}


@checked
class PackagedJudge(Reward):
    """The score of a judge that needs an older transformers than this package, for ``lightning serve-reward``.

    Args:
        model: HPSv3 (human preference) and EditReward (an edit of a picture) have no fixed range; DeQA (technical
            quality, whatever the prompt) is from 1 to 5.
        name: Key of the score.
        device: Device of the model.
        checkpoint: Hub name or local folder; HPSv3's package names one.

    Source:
        The calls: MizzenAI/HPSv3 (package hpsv3 1.0.0), zhiyuanyou/DeQA-Score, TIGER-AI-Lab/EditReward.
    """

    def __init__(
        self,
        model: Literal["HPSv3", "DeQA", "EditReward"],
        name: str = "judge",
        device: str = "cuda",
        checkpoint: str = "",
    ) -> None:
        self.model, self.name, self.device, self.checkpoint = model, name, device, checkpoint
        self._score: Any = None

    @property
    def takes_references(self) -> bool:
        return self.model == "EditReward"

    def prompt_error(self, prompt: str, row: dict[str, Any]) -> str | None:
        return several_pictures_error(prompt, row) if self.takes_references else None

    def check(self) -> list[str]:
        """Report an environment without the judge's packages."""
        package = PACKAGES[self.model]
        try:
            is_here = find_spec(package) is not None and version("transformers").startswith("4.")
        except PackageNotFoundError:
            is_here = False
        needs = f"{self.model} needs {package} and transformers 4, in a separate environment"
        return [] if is_here else [f"{needs}. Run: lightning serve-reward {self.model} --print-setup"]

    def load(self) -> None:
        if self._score is None:
            leave_silent_hub()
        self._score = self._score or {"HPSv3": _hpsv3, "DeQA": _deqa, "EditReward": _edit_reward}[self.model](self)

    def __call__(
        self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]], references: Tensor | None = None
    ) -> Tensor:
        if self.takes_references and references is None:
            raise RewardError("EditReward needs the pictures that the prompts edit. Set send_pictures of HTTPReward.")
        self.load()
        given = {} if references is None else {"image_src": to_pil(references)}
        return torch.tensor([float(score) for score in self._score(to_pil(images), prompts, **given)])


def _hpsv3(judge: PackagedJudge) -> Callable[..., Any]:
    from hpsv3 import HPSv3RewardInferencer

    return _first(HPSv3RewardInferencer(device=judge.device))


def _deqa(judge: PackagedJudge) -> Callable[..., Any]:
    from transformers import AutoModelForCausalLM

    options = {"attn_implementation": "eager", "torch_dtype": torch.float16, "device_map": judge.device}
    model: Any = AutoModelForCausalLM.from_pretrained(judge.checkpoint, trust_remote_code=True, **options)
    return lambda images, prompts: model.score(images)


def _edit_reward(judge: PackagedJudge) -> Callable[..., Any]:
    import EditReward
    from huggingface_hub import snapshot_download

    folder = local_folder(judge.checkpoint) or snapshot_download(judge.checkpoint)
    options = {"reward_dim": "overall_detail", "rm_head_type": "ranknet_multi_head", "device": judge.device}
    config = Path(EditReward.__file__).parent / EDIT_CONFIG
    return _first(EditReward.EditRewardInferencer(config_path=str(config), checkpoint_path=str(folder), **options))


def _first(model: Any) -> Callable[..., Any]:
    """Return a function for the predicted means; each comes with a deviation."""

    def score(images: list[Any], prompts: list[str], **given: Any) -> list[Any]:
        # by name: the order of the arguments differs between versions
        return [row[0] for row in model.reward(prompts=prompts, image_paths=images, **given)]

    return score
