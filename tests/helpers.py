"""Small real runs, without the command."""

import socket

import lightning as L

from lit_vgrpo import VGRPO, OptimizerConfig, PromptDataModule, RolloutSpec, SD3Policy, VGRPOModule
from lit_vgrpo.rewards import Reward, ShapesReward


class Brightness(Reward):
    """Mean pixel value: differs a little from image to image, even on a random model."""

    name = "brightness"

    def __call__(self, images, prompts, rows):
        return images.mean(dim=(1, 2, 3))


def make_module(folder, objective=None, reward=None, policy_options=None, **options):
    policy = SD3Policy(str(folder), max_sequence_length=1, **(policy_options or {}))
    objective = objective or VGRPO(RolloutSpec(steps=2), num_mc_samples=2)
    options = {"optimizer": OptimizerConfig(lr=1e-2), **options}
    return VGRPOModule(policy, objective, reward or Brightness(), **options)


def make_data(**options):
    sizes = {"prompts_per_iteration": 2, "group_size": 4, "micro_batch_size": 4, "heldout_limit": 2}
    files = {"train": "shipped:prompts/shapes_train.jsonl", "heldout": "shipped:prompts/shapes_heldout.jsonl"}
    return PromptDataModule(**{**files, **sizes, **options})


def make_trainer(folder, iterations=2, callbacks=(), **options):
    defaults = {
        "accelerator": "cpu",
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


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def weights(module):
    return {name: p.detach().clone() for name, p in module.policy.named_parameters() if p.requires_grad}


__all__ = ["Brightness", "ShapesReward", "free_port", "make_data", "make_module", "make_trainer", "weights"]
