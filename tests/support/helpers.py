"""Small real runs, without the command."""

import csv
import json
import math
import os
import socket

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from PIL import Image

from lit_vgrpo import VGRPO, OptimizerConfig, PromptDataModule, RolloutSpec, SD3Policy, VGRPOModule
from lit_vgrpo.core.sharding import local
from lit_vgrpo.data import read_prompts
from lit_vgrpo.rewards import Reward, ShapesReward


class Brightness(Reward):
    """Mean pixel value: differs a little from image to image, even on a random model."""

    name = "brightness"
    differentiable = True

    def __call__(self, images, prompts, rows):
        return images.mean(dim=(1, 2, 3))


class Unreachable(CSVLogger):
    """A tracker whose server is down."""

    def __init__(self, save_dir: str = ".") -> None:
        raise RuntimeError("no server at localhost:1")


class SaveAt(L.Callback):
    """Saves within an iteration after a number of backward passes: where an update ends, or before the next pass."""

    def __init__(self, path, iteration, passes):
        self.path, self.when = path, (iteration, passes)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.passes = 0

    def on_after_backward(self, trainer, pl_module):
        self.passes += 1

    def on_before_backward(self, trainer, pl_module, *args):
        if (pl_module.record.iteration, self.passes) == self.when and not self.path.exists():
            trainer.save_checkpoint(self.path)

    on_before_zero_grad = on_before_backward


class Breaking(L.Callback):
    """After an update of iteration 1 a weight of the last rank is infinite."""

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        if pl_module.record.iteration == 1 and trainer.global_rank == trainer.world_size - 1:
            weight = next(p for p in pl_module.policy.parameters() if p.requires_grad)
            local(weight).view(-1)[0] = math.inf


def repeating(values, slow):
    """Cases for parametrize; those in ``slow`` show nothing in make test that the others do not."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=[pytest.mark.slow] * (value in slow))
        for value in values
    ]


def grey_level(side=32):
    """Return the least difference of two pictures' means: one grey level of one channel of one pixel.

    Float error below what the eye or a file shows can flip it, so no bound on what is made of eight bits lies below.
    """
    return 1 / (255 * 3 * side * side)


def prompt_file(name):
    """The address of a shipped prompt file."""
    return f"shipped:prompts/{name}"


SMALL_PICTURES = (
    "from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus",
    "plus.CONDITION_IMAGE_SIZE = plus.VAE_IMAGE_SIZE = 2048",
)
"""Lines to execute, after which Qwen-Image-Edit looks at pictures at 64 x 32 pixels instead of 1024 x 1024."""


def picture_prompts(folder, side):
    """Write a file of six prompts, each with a picture of noise to edit, ``side`` pixels wide and high."""
    rows = [{"prompt": row["prompt"]} for row in read_prompts(prompt_file("shapes_train.jsonl"))[:6]]
    for number, row in enumerate(rows):
        draw = torch.Generator().manual_seed(number)
        pixels = torch.randint(256, (side, side, 3), generator=draw, dtype=torch.uint8)
        row["image"] = f"{number}.png"
        Image.fromarray(pixels.numpy()).save(folder / row["image"])
    file = folder / "pictures.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(file)


def make_module(folder, objective=None, reward=None, policy_options=None, policy=None, **options):
    policy = policy or SD3Policy(str(folder), max_sequence_length=1, **(policy_options or {}))
    objective = objective or VGRPO(RolloutSpec(steps=2), num_mc_samples=2)
    options = {"optimizer": OptimizerConfig(lr=1e-2), **options}
    return VGRPOModule(policy, objective, reward or Brightness(), **options)


def make_data(**options):
    sizes = {"prompts_per_iteration": 2, "group_size": 4, "micro_batch_size": 4, "heldout_limit": 2}
    files = {"train": prompt_file("shapes_train.jsonl"), "heldout": prompt_file("shapes_heldout.jsonl")}
    return PromptDataModule(**{**files, **sizes, **options})


def make_trainer(folder, iterations=2, callbacks=(), **options):
    defaults = {
        "accelerator": "gpu" if os.environ.get("PRETEND_GPU") else "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
    return L.Trainer(
        max_epochs=iterations, default_root_dir=folder, callbacks=list(callbacks), **{**defaults, **options}
    )


def fit(folder, tmp_path, callbacks=(), iterations=3, data=None, trainer=None, ckpt=None, **options):
    """Train a small run, and return its module and trainer."""
    module = make_module(folder, **options)
    fitter = make_trainer(tmp_path, iterations, callbacks, **(trainer or {}))
    fitter.fit(module, datamodule=make_data(**(data or {})), ckpt_path=ckpt)
    return module, fitter


def read_csv(file):
    """The rows of a table, by column."""
    with open(file, newline="") as opened:
        return list(csv.DictReader(opened))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def weights(module):
    return {name: p.detach().clone() for name, p in module.policy.named_parameters() if p.requires_grad}


def same(one, other):
    """True for tensors of the same names and values, on any device."""
    return one.keys() == other.keys() and all(torch.equal(x.cpu(), other[name].cpu()) for name, x in one.items())


__all__ = ["Brightness", "ShapesReward", "free_port", "make_data", "make_module", "make_trainer", "same", "weights"]
