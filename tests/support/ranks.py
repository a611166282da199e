"""Run by processes.run_ranks or torchrun: trains what each job names on its ranks, and writes what came out of it.

    torchrun --nproc-per-node 2 tests/support/ranks.py POLICY_FOLDER OUT JOB [JOB ...]

A job is ``place/strategy/name|key=value,...``: its folder in OUT, a strategy, a name from all_methods.METHODS or
"skip", "stop" or "outage", and options of the data module. ``middle=1`` saves within iteration 1, after its first
update. A job whose folder holds a checkpoint name.ckpt continues from it.
"""

import math
import os
import sys
from functools import partial
from pathlib import Path

import lightning as L
import torch
from all_methods import METHODS, REPLAYED, REUSED
from helpers import Brightness, make_data, make_module, make_trainer, prompt_file
from processes import small_strategy
from teachers import make_student, make_task

from lit_vgrpo import VGRPO, OptimizerConfig, RolloutSpec
from lit_vgrpo.callbacks import EMA
from lit_vgrpo.core.gather import all_gather
from lit_vgrpo.core.snapshots import Snapshot
from lit_vgrpo.launch.train import leave_together
from lit_vgrpo.rewards import JPEGCompressibility, RewardError, Weighted
from lit_vgrpo.training.checkpoint import RunCheckpoint

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
DATA = {"prompts_per_iteration": 4, "group_size": 4, "micro_batch_size": 4, "heldout_limit": 5, "eval_batch_size": 3}


class Broken(VGRPO):
    """On the last rank alone, the loss of one micro-batch in the third update is not a number."""

    def __init__(self):
        super().__init__(RolloutSpec(steps=2))
        self.started = 0

    def before_update(self, policy, micros, ledger=None):
        self.started += 1

    def loss(self, policy, micro):
        loss, metrics = super().loss(policy, micro)
        return loss * (math.nan if self.started == 3 and RANK == WORLD - 1 else 1), metrics


def anchored():
    return VGRPO(RolloutSpec(steps=2), num_mc_samples=2, anchor_weight=1.0, anchor_decay=0.3)


class ConstantInOne(Brightness):
    """Says nothing in iteration 1."""

    iteration = -1

    def __call__(self, images, prompts, rows):
        scores = super().__call__(images, prompts, rows)
        return torch.zeros_like(scores) if self.iteration == 1 else scores


class NoneFromTwo(ConstantInOne):
    """Scores nothing from iteration 2 on."""

    def __call__(self, images, prompts, rows):
        return super().__call__(images, prompts, rows) * (math.nan if self.iteration >= 2 else 1)


TWO_SOURCES = {
    "train": [
        {"path": prompt_file("shapes_train.jsonl"), "name": "light", "rewards": "brightness", "weight": 3},
        {"path": prompt_file("shapes_heldout.jsonl"), "name": "small", "rewards": "jpeg"},
    ],
    "heldout": None,
    "heldout_fraction": 0.2,
}
IDLE = {
    "reward": ConstantInOne(),
    "optimizer": partial(torch.optim.AdamW, lr=1e-4, eps=1e-6),
    "lr_scheduler": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=6),
}


def options(text):
    pairs = (pair.split("=") for pair in text.split(",") if pair)
    return {key: value == "true" if value in ("true", "false") else int(value) for key, value in pairs}


def job(folder, out, strategy, text):
    name, _, words = text.partition("|")
    chosen = options(words)
    own = {"skip": Broken, "stop": Broken, "idle": anchored, "outage": anchored, "two sources": anchored}
    # A larger eps: Adam makes whole steps of the rounding noise of a gradient that is zero, as that of a key bias is.
    chosen_parts = IDLE if name == "idle" else {"optimizer": OptimizerConfig(lr=1e-4, eps=1e-6)}
    chosen_parts = {**chosen_parts, "gradient_clip_val": 0.5}
    if name == "outage":
        chosen_parts["reward"] = NoneFromTwo()
    if name == "two sources":
        chosen |= TWO_SOURCES
        chosen_parts |= {"reward": Weighted([Brightness(), JPEGCompressibility()]), "advantage_std": "source"}
    if name == "OPD":
        module = make_student(folder, Path(out, f"teachers.{RANK}"))
    else:
        objective = own[name]() if name in own else (METHODS | REPLAYED | REUSED)[name][0]()
        module = make_module(folder, objective, non_finite="skip" if name == "skip" else "stop", **chosen_parts)
    ema, seen = EMA(0.5), Seen()
    module.evaluator.observers.append(seen)
    callbacks = [ema, seen, SaveInTheMiddle(chosen.pop("middle", -1), Path(out) / f"{name}.middle.ckpt")]
    callbacks += [RunCheckpoint(best=None)] if name == "outage" else []
    ckpt = Path(out) / f"{name}.ckpt"
    ranks = {"strategy": small_strategy(strategy), "devices": WORLD} if WORLD > 1 else {}
    saves = {"enable_checkpointing": name == "outage"}
    trainer = make_trainer(out, chosen.pop("iterations", 3), callbacks, **ranks, **saves)
    error = ""
    try:
        data = (make_task if name == "OPD" else make_data)(**{**DATA, **chosen})
        trainer.fit(module, datamodule=data, ckpt_path=ckpt if ckpt.exists() else None)
    except (FloatingPointError, RewardError) as stopped:
        error = str(stopped)
    result = {
        "weights": Snapshot(module).state_dict(),
        "ema": ema.average.state_dict(),
        "rewards": seen.rewards,
        "images": seen.images,
        "sources": [torch.tensor([*of.values()]) for _, of in sorted(module.record.sources.items())],
        "ranks": trainer.world_size,
        "groups": module.record.group_ids,
        "row": {name: value for name, value in module.record.logged.items() if name.startswith("policy/")},
        "updates": module.objective.num_updates,
        "skipped": module.guard.skipped,
        "error": error,
    }
    torch.save(result, Path(out) / f"{name}.{RANK}.pt")


class SaveInTheMiddle(L.Callback):
    def __init__(self, iteration, path):
        self.iteration, self.path = iteration, path

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        if (pl_module.record.iteration, pl_module.iteration.updates_done) == (self.iteration, 1):
            trainer.save_checkpoint(self.path)


class Seen(L.Callback):
    """Keeps every iteration's rewards, and a number that stands for each held-out image."""

    def __init__(self):
        self.rewards, self.images, self._means = [], [], {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.reward.rewards[0].iteration = batch.iteration

    def on_train_epoch_end(self, trainer, pl_module):
        self.rewards.append(pl_module.record.rewards)

    def update(self, images, batch):
        positions = torch.linspace(0, 1, images[0].numel()).reshape(images[0].shape)
        self._means |= zip(batch.slots, (images * positions).mean(dim=(1, 2, 3)).tolist(), strict=True)

    def compute(self, module):
        numbers = torch.zeros(DATA["heldout_limit"], dtype=torch.float64)
        for slot, value in self._means.items():
            numbers[slot] = value
        self._means = {}
        self.images.append(all_gather(numbers[None]).sum(0))
        return {}


def main(folder, out, *jobs):
    for text in jobs:
        place, strategy, rest = text.split("/")
        Path(out, place).mkdir(exist_ok=True)
        job(folder, Path(out, place), strategy, rest)


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave_together()
