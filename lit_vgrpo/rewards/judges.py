"""Presets of published judges: their models, questions, answer formats and scales.

``lightning serve-reward NAME --print-setup`` prints the commands that install and start one, with its source.
"""

from __future__ import annotations

from abc import abstractmethod
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.pixels import to_pil
from lit_vgrpo.core.ranges import checked
from lit_vgrpo.rewards.base import Reward, RewardError
from lit_vgrpo.rewards.http import Connection
from lit_vgrpo.rewards.questions import QuestionScore
from lit_vgrpo.rewards.vlm_judge import VLMJudge
from lit_vgrpo.system.hub import local_folder

SERVER = "http://127.0.0.1:8000/v1"
ASPECT_TEMPLATE = """\
Rate a generated image and its caption on three axes, each from 1 to 5.
- Alignment: does the content of the image match the caption?
- Coherence: is the image consistent in itself, without glitches or distorted objects?
- Style: how pleasing is the image, whatever the caption says?
Answer in this format:
Alignment Score (1-5): X
Coherence Score (1-5): Y
Style Score (1-5): Z
Text Caption: [{prompt}]"""
ASPECT_PATTERN = r"(?:Alignment|Coherence|Style) Score(?: \([^)\n]*\))?[*\s]*:[*\s]*(-?\d+(?:\.\d+)?)"
RATIONALE_TEMPLATE = """\
User Instruction: {prompt}
You are an expert evaluator of generated images. Judge the image above, which was generated from this instruction, on \
three aspects. Justify a score from 1 to 4 for each, with decimals: 4 has no flaws, 3 minor ones, 2 some, 1 severe ones.
1. Text Faithfulness: does the image show all that the instruction asks for, and nothing else?
2. Physical and Visual Quality: is it plausible in light, geometry and anatomy, and free of artifacts?
3. Text Rendering: is the text in it correct and legible? N/A if the instruction asks for no text.
Answer in this format:
# User Request Analysis
# Detailed Judgement
1. Text Faithfulness:
## Justification: [evidence]
## Score: [number]
2. Physical and Visual Quality:
## Justification: [evidence]
## Score: [number]
3. Text Rendering:
## Justification: [evidence]
## Score: [number or N/A]
# Summary:"""
RATIONALE_PATTERN = r"(?im)^[#*\s]*Score[*\s]*:[*\s]*(\d+(?:\.\d+)?|N/A)"


@checked
class UnifiedReward2(VLMJudge):
    """UnifiedReward 2.0: the mean of an image's alignment, coherence and style, 1 to 5; or the best of several images.

    Args:
        url: Address of the API.
        model: The server's name of the model.
        name: Key of the score.
        compare: See :class:`VLMJudge`.
        connection: Timeouts, retries, simultaneous requests, and the token.

    Source:
        Axes, range and answer format: CodeGoat24/UnifiedReward, UnifiedReward-2.0-inference; our wording.
    """

    def __init__(
        self,
        url: str = SERVER,
        model: str = "CodeGoat24/UnifiedReward-2.0-qwen3vl-8b",
        name: str = "unified_reward",
        compare: Literal["pairs", "group"] | None = None,
        connection: Connection | None = None,
    ) -> None:
        asked = (None, None) if compare else (ASPECT_TEMPLATE, ASPECT_PATTERN)
        super().__init__(url, model, name, *asked, num_scores=3, compare=compare, connection=connection)


@checked
class RationalRewards(VLMJudge):
    """RationalRewards (T2I): the mean of faithfulness, quality and, if there is any, rendered text, 1 to 4.

    The answer ends before its summary, after the scores.

    Args:
        url: Address of the API.
        model: The server's name of the model.
        name: Key of the score.
        connection: Timeouts, retries, simultaneous requests, and the token.

    Source:
        Aspects, range and answer format: TIGER-AI-Lab/RationalRewards, whose code maps the mean to (mean - 1) / 3; our
        wording.
    """

    def __init__(
        self,
        url: str = SERVER,
        model: str = "TIGER-Lab/RationalRewards-8B-T2I",
        name: str = "rational_rewards",
        connection: Connection | None = None,
    ) -> None:
        super().__init__(
            url,
            model,
            name,
            RATIONALE_TEMPLATE,
            RATIONALE_PATTERN,
            (1.0, 4.0),
            num_scores=3,
            max_tokens=2048,
            extra_body={"stop": ["# Summary"]},
            connection=connection,
        )


@checked
class VQAScore(QuestionScore):
    """VQAScore: the probability that a model answers yes to whether the image shows the prompt, 0 to 1.

    Args:
        url: Address of the API.
        model: The server's name of the model. The paper's CLIP-FlanT5 has no such server.
        name: Key of the score.
        connection: Timeouts, retries, simultaneous requests, and the token.

    Source:
        The question: linzhiqiu/t2v_metrics 3.1, for Qwen3-VL; arXiv 2404.01291. It counts only the token ``Yes``.
    """

    def __init__(
        self,
        url: str = SERVER,
        model: str = "Qwen/Qwen3-VL-8B-Instruct",
        name: str = "vqa_score",
        connection: Connection | None = None,
    ) -> None:
        question, instruction = 'Does this figure show "{prompt}"?', "Please answer Yes or No."
        super().__init__(url, model, name, "", question, instruction, connection=connection)


class PackagedJudge(Reward):
    """A judge that runs in an environment of its own, because it needs an older transformers than this package.

    Args:
        device: Device of the model.
    """

    package: ClassVar[str]

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        self._model: Any = None

    def check(self) -> list[str]:
        """Report an environment without the judge's packages."""
        try:
            is_here = find_spec(self.package) is not None and version("transformers").startswith("4.")
        except PackageNotFoundError:
            is_here = False
        name = type(self).__name__
        needs = f"{name} needs {self.package} and transformers 4, in an environment of its own"
        return [] if is_here else [f"{needs}. Run: lightning serve-reward {name} --print-setup"]

    def load(self) -> None:
        if self._model is None:
            self._model = self._build()

    @abstractmethod
    def _build(self) -> Any:
        """Return the loaded model."""


class HPSv3(PackagedJudge):
    """HPSv3: the mean of the predicted human preference for an image and its prompt, without a fixed range.

    Args:
        device: Device of the model.

    Source:
        MizzenAI/HPSv3, package hpsv3 1.0.0; ICCV 2025.
    """

    name = "hpsv3"
    package = "hpsv3"

    def _build(self) -> Any:
        from hpsv3 import HPSv3RewardInferencer

        return HPSv3RewardInferencer(device=self.device)

    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        self.load()
        # by name: the order of the arguments differs between versions
        return _first(self._model.reward(prompts=prompts, image_paths=to_pil(images)))


class DeQA(PackagedJudge):
    """DeQA-Score: the technical quality of an image, 1 to 5, whatever its prompt.

    Args:
        device: Device of the model.
        checkpoint: Hub name or local folder, whose code is run.

    Source:
        zhiyuanyou/DeQA-Score; arXiv 2501.11561.
    """

    name = "deqa"
    package = "accelerate"

    def __init__(self, device: str = "cuda", checkpoint: str = "zhiyuanyou/DeQA-Score-Mix3") -> None:
        super().__init__(device)
        self.checkpoint = checkpoint

    def _build(self) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(
            self.checkpoint,
            trust_remote_code=True,
            attn_implementation="eager",
            torch_dtype=torch.float16,
            device_map=self.device,
        )

    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        self.load()
        return torch.tensor([float(score) for score in self._model.score(to_pil(images))])


class EditReward(PackagedJudge):
    """EditReward (MiMo-VL-7B): how well an image follows an edit of a picture, without a fixed range.

    Args:
        device: Device of the model.
        checkpoint: Hub name, or local folder with ``model.safetensors``.

    Source:
        TIGER-AI-Lab/EditReward; arXiv 2509.26346.
    """

    name = "edit_reward"
    package = "EditReward"
    config = "EditReward-MiMo-VL-7B-SFT-2508.yaml"

    def __init__(self, device: str = "cuda", checkpoint: str = "TIGER-Lab/EditReward-MiMo-VL-7B-SFT-2508") -> None:
        super().__init__(device)
        self.checkpoint = checkpoint

    def _build(self) -> Any:
        import EditReward
        from huggingface_hub import snapshot_download

        return EditReward.EditRewardInferencer(
            config_path=str(Path(EditReward.__file__).parent / "config" / self.config),
            checkpoint_path=str(local_folder(self.checkpoint) or snapshot_download(self.checkpoint)),
            device=self.device,
            reward_dim="overall_detail",
            rm_head_type="ranknet_multi_head",
        )

    def __call__(
        self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]], references: Tensor | None = None
    ) -> Tensor:
        if references is None:
            raise RewardError("EditReward needs the pictures that the prompts edit. Set send_pictures of HTTPReward.")
        self.load()
        pictures = {"image_src": to_pil(references), "image_paths": to_pil(images)}
        return _first(self._model.reward(prompts=prompts, **pictures))


def _first(rows: Any) -> Tensor:
    """Return the means of predicted means and deviations."""
    return torch.tensor([float(row[0]) for row in rows])
