"""Small local checkpoints in place of those that the large recipes name, and a server that answers as a judge."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from zlib import crc32

import scorer_files
import torch
import yaml
import zoo
from diffusers import AutoencoderKL
from fault_server import FaultServer, answering
from geneval_models import save_segmenter
from teachers import save_teachers
from tiny_large_models import (
    build_chroma,
    build_flux2,
    build_flux2_dev,
    build_qwen_image,
    build_qwen_image21,
    build_wan,
    build_z_image,
)
from tiny_pipelines import build_clip, build_flux, build_sd3, build_sdxl, build_unet

from lit_vgrpo.config.recipe import find_recipe
from lit_vgrpo.rewards.geneval_rules import CLASSES
from lit_vgrpo.system.paths import resolve_path

BUILDERS = {"SD3Policy": build_sd3, "UNetPolicy": build_unet, "SDXLPolicy": build_sdxl, "FluxPolicy": build_flux}
LARGE = {
    "QwenImagePolicy": build_qwen_image,
    "QwenImage21Policy": build_qwen_image21,
    "Flux2Policy": build_flux2,
    "Flux2DevPolicy": build_flux2_dev,
    "ChromaPolicy": build_chroma,
    "WanPolicy": build_wan,
    "ZImagePolicy": build_z_image,
    "KontextPolicy": partial(build_flux, small=True, edits=True),
}
"""Builders of families whose VAEs are small already."""
STARTS = {
    "tiny_sd3_start": build_sd3,
    "tiny_unet_start": build_unet,
    "tiny_ocr_start": partial(build_sd3, task="words"),
}
"""Models that the pre-training recipes make, without a trained VAE."""
FLUX3 = "black-forest-labs/flux-3-image-klein-base"
LEARNED = {
    "fal/AuraFlow-v0.3": "AuraFlowPipeline",
    "Lightricks/LTX-Video": "LTXPipeline",
    "HiDream-ai/HiDream-I1-Full": "HiDreamImagePipeline",
    "hunyuanvideo-community/HunyuanImage-2.1-Diffusers": "HunyuanImagePipeline",
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": "WanImageToVideoPipeline",
    FLUX3: "Flux3ModularPipeline",
}
"""Pipelines in the zoo, by the checkpoint of a recipe that names no policy class."""
SHIFTED = ("SD3Policy", "FluxPolicy")


def wide_vae(shifted):
    """A VAE that shrinks 64 times, so that 512 pixels are few tokens."""
    blocks = 7
    torch.manual_seed(0)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(2,) * blocks,
        layers_per_block=1,
        latent_channels=8,
        norm_num_groups=1,
        scaling_factor=0.8,
        shift_factor=0.1 if shifted else None,
        mid_block_add_attention=False,
    )


@dataclass
class StandIns:
    """Makes each checkpoint when it is first asked for.

    Args:
        folder: where they go.
        server: answers as the judge.
    """

    folder: Path
    server: FaultServer
    made: dict[str, object] = field(default_factory=dict)

    def policy(self, class_name):
        """A pipeline of that family, with the wide VAE where it takes one."""
        if class_name in LARGE:
            return self._once(class_name, LARGE[class_name])
        vae = wide_vae(class_name in SHIFTED)
        return self._once(class_name, lambda folder: BUILDERS[class_name](folder, vae=vae, small=True))

    def reward(self, class_name):
        """The arguments that name a reward's checkpoints, and no others."""
        if class_name in ("PickScore", "CLIPScore", "CLIPImageSimilarity"):
            return {"checkpoint": str(self._clip())}
        if class_name == "AestheticScore":
            head = self._once("head", lambda folder: scorer_files.write_aesthetic(folder, width=32))
            return {"checkpoint": str(head), "clip": str(self._clip())}
        if class_name == "GenEval":
            detector = self._once("detector", lambda folder: save_segmenter(folder, dict(enumerate(CLASSES))))
            return {"detector": str(detector), "clip": str(self._clip())}
        if class_name == "HPSv2":
            folder, model = self._once("hps", scorer_files.write_hps)
            return {"checkpoint": str(folder), "model": model}
        if class_name == "ImageReward":
            folder = str(self._once("image_reward", scorer_files.write_image_reward))
            return {"checkpoint": folder, "tokenizer": folder}
        return {"url": f"{self.server.address}/v1"} if class_name == "VLMJudge" else {}

    def words(self, recipe):
        """Overrides that put stand-ins in the place of a recipe's checkpoints and addresses; all else stays."""
        tree = yaml.safe_load(find_recipe(str(recipe)).read_text())
        model, policy, words = tree["model"], tree["model"]["policy"], []
        for key in ("train", "heldout"):
            if str(tree["data"][key]).startswith("edits/"):  # the user's own
                words.append(f"data.{key}=shipped:prompts/edit_{key}.jsonl")
        checkpoint = policy.get("init_args", policy)["checkpoint"]
        if checkpoint in STARTS:
            start = self._once(checkpoint, lambda folder: STARTS[checkpoint](folder, small=True))
            words.append(f"model.policy.checkpoint={start}")
        elif checkpoint in LEARNED:
            folder = self._once(LEARNED[checkpoint], lambda folder: zoo.save(LEARNED[checkpoint], folder))
            words.append(f"model.policy.checkpoint={folder}")
            words += [f"model.policy.components.{name}={folder}" for name in policy.get("components", ())]
        elif not checkpoint.startswith("shipped:"):
            words.append(f"model.policy.checkpoint={self.policy(policy['class_path'])}")
        if teachers := model["objective"]["init_args"].get("teachers"):
            folder = words[-1].partition("=")[2] if words else resolve_path(checkpoint)
            made = save_teachers(folder, self.folder / recipe.stem, teachers)
            words.append(f"model.objective.init_args.teachers={json.dumps(made)}")
        for key in ("reward", "untrained_reward"):
            if key in model and (filled := self._filled(model[key])) != model[key]:
                words.append(f"model.{key}={json.dumps(filled)}")
        return words

    def _filled(self, reward):
        node = {"class_path": reward} if isinstance(reward, str) else dict(reward)
        options = {**node.get("init_args", {}), **self.reward(node.get("class_path"))}
        if "rewards" in options:
            options["rewards"] = [self._filled(part) for part in options["rewards"]]
        if "reward" in options:
            options["reward"] = self._filled(options["reward"])
        return reward if options == node.get("init_args", {}) else {**node, "init_args": options}

    def _clip(self):
        return self._once("clip", build_clip)

    def _once(self, name, make):
        if name not in self.made:
            folder = self.folder / name
            folder.mkdir(exist_ok=True)
            self.made[name] = make(folder) or folder
        return self.made[name]


def judge():
    """A server that knows the recipes' judge and gives each image a score from 1 to 5, whatever came before."""

    def answer(handler):
        text = f"Final Score: {1 + crc32(handler.body) % 5}"
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        choice["logprobs"] = {"content": [{"top_logprobs": [{"token": "Yes", "logprob": -0.5}]}]}
        return answering({"id": "1", "object": "chat.completion", "choices": [choice]})(handler)

    return FaultServer(pages={"/v1/models": (200, b"{}")}, then=answer)
