"""Small runs under one strategy after the other, as one process of one or several: ``worker.py SPEC.json``.

A run is ``{name, strategy, iterations, ...}``; ``as_named`` leaves DeepSpeed's own settings as they are. It leaves
``NAME.ckpt``, and on rank 0 ``NAME.pt`` with what it showed. One of a model family is
``{name, policy, options, lora, strategy, data}``, of which ``data`` are options of the data module, and ``strategy``
may be options of FSDP2; it takes one iteration of V-GRPO unless ``iterations`` and ``method`` say otherwise, and leaves
``NAME.ckpt``, its last metrics in ``NAME.pt``, and ``NAME-export``.
"""

import json
import math
import os
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import lightning as L
import torch
from all_methods import METHODS
from helpers import SMALL_PICTURES, Brightness, make_data, make_module, make_trainer
from processes import small_strategy

from lit_vgrpo import VGRPO, OptimizerConfig, RolloutSpec, SD3Policy, VGRPOModule, policies
from lit_vgrpo.callbacks import EMA, Export, RewardLogger, SampleGrid, averaged_weights
from lit_vgrpo.core.gather import all_gather
from lit_vgrpo.training.sharded import FSDP2

PROMPTS = ["a red circle on the left", "a blue square on the right"]


def stirred(family):
    """The family, started away from where an adapter does nothing and some weights get no gradient."""

    class Stirred(family):
        def adopt(self, pipeline, put_start=None):
            super().adopt(pipeline, put_start)
            generator = torch.Generator().manual_seed(0)
            for parameter in self.network.parameters():
                if parameter.requires_grad:
                    parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
            return self

    return Stirred


class Coarse(Brightness):
    """Blind to the one pixel that float error rounds to another byte: random pictures differ by little more."""

    def __call__(self, images, prompts, rows):
        return (4000 * super().__call__(images, prompts, rows)).round()


class Broken(VGRPO):
    """On the last rank alone, the losses of the third update are not numbers."""

    updates = 0

    def before_update(self, policy, micros, ledger=None):
        super().before_update(policy, micros, ledger)
        self.updates += 1

    def loss(self, policy, micro):
        loss, metrics = super().loss(policy, micro)
        is_last = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
        return loss * (math.nan if self.updates == 3 and is_last else 1.0), metrics


class Witness(L.Callback):
    """Keeps the rewards, gradient norms and images of a run; the images with the weights, the average, the weights."""

    def __init__(self):
        self.seen = {"rewards": [], "norms": []}
        self._heldout = {}

    def update(self, images, batch):
        self._heldout |= zip(batch.slots, images.cpu(), strict=True)

    def compute(self, module):
        """Held-out images, drawn with the average in the moment after a step."""
        shape = next(iter(self._heldout.values())).shape
        images = torch.stack([self._heldout.get(slot, torch.zeros(shape)) for slot in range(2)])
        self.seen["heldout"] = all_gather(images[None]).sum(0)
        self._heldout = {}
        return {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen["rewards"].append(pl_module.record.rewards.clone())

    def on_train_epoch_end(self, trainer, pl_module):
        self.seen["norms"].append(trainer.callback_metrics["policy/grad_norm"].clone())

    def on_train_end(self, trainer, pl_module):
        def draw():
            return pl_module.evaluator.generate(PROMPTS, [0, 1]).cpu()

        self.seen["images"] = draw()
        with averaged_weights(trainer, pl_module):
            self.seen["averaged"] = draw()
        self.seen["after_swap"] = draw()
        network = pl_module.policy.network
        self.seen["dtypes"] = sorted({f"{p.requires_grad} {p.dtype}" for p in network.parameters()})
        self.seen["steps"] = trainer.global_step
        self.seen["updates"] = pl_module.objective.num_updates


def train(run, folder, sd3):
    lora = run.get("lora", False)
    method = Broken if run.get("broken") else VGRPO
    dtype = run.get("dtype", "float32")
    module = make_module(
        sd3,
        method(RolloutSpec(steps=2), num_mc_samples=2, anchor_weight=0.5, anchor_decay=0.3, soft_clip=3.0),
        # A larger eps: where a gradient is only rounding noise, as that of a key's bias is, Adam makes a step of it.
        optimizer=OptimizerConfig(lr=2e-4 if lora else 2e-5, warmup_steps=3, eps=1e-6),
        rollout_batch_size=2,
        policy=stirred(SD3Policy)(sd3, max_sequence_length=1, lora_rank=64 if lora else None, dtype=dtype),
        non_finite="skip",
        gradient_clip_val=0.05,
    )
    witness = Witness()
    module.evaluator.observers.append(witness)
    callbacks = [EMA(0.8, warmup=False), RewardLogger(), witness]
    if run.get("writes"):
        callbacks.append(Export(f"{run['name']}-export"))
        if not lora and run["strategy"] == "fsdp2":  # the others generate images in their evaluation
            callbacks.append(SampleGrid(2, 1, every_n_iterations=1))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    strategy = run["strategy"] if run.get("as_named") else small_strategy(run["strategy"])
    chosen = {"strategy": strategy} if strategy else {}
    trainer = make_trainer(folder, run["iterations"], callbacks, devices=world, **chosen)
    data = make_data(**{"micro_batch_size": 2, "updates_per_iteration": 2, **run.get("data", {})})
    start = str(folder / f"{run['start']}.ckpt") if "start" in run else None
    trainer.fit(module, datamodule=data, ckpt_path=start)
    trainer.save_checkpoint(folder / f"{run['name']}.ckpt")
    if trainer.is_global_zero:
        torch.save(witness.seen, folder / f"{run['name']}.pt")


def train_family(run, folder):
    policy = stirred(getattr(policies, run["policy"]))(**run["options"], lora_rank=8 if run["lora"] else None)
    module = VGRPOModule(
        policy,
        METHODS[run["method"]][0]()
        if "method" in run
        else VGRPO(RolloutSpec(policy.solvers[0], steps=2, guidance=2.0), num_mc_samples=2, kl_weight=0.5),
        Brightness() if "method" in run else Coarse(),
        # A larger eps: Adam would make a whole step of a gradient of 1e-7, of which a tenth is rounding noise.
        optimizer=OptimizerConfig(lr=2e-4 if run["lora"] else 2e-5, warmup_steps=0, eps=1e-5),
        rollout_batch_size=2,
        gradient_clip_val=0.05,
    )
    callbacks = [EMA(0.8, warmup=False), Export(f"{run['name']}-export")]
    world = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = {"strategy": run["strategy"]} if run["strategy"] else {}
    if isinstance(run["strategy"], dict):
        chosen = {"strategy": FSDP2(**run["strategy"])}
    trainer = make_trainer(folder, run.get("iterations", 1), callbacks, devices=world, **chosen)
    start = str(folder / f"{run['start']}.ckpt") if "start" in run else None
    data = make_data(**{"micro_batch_size": 2, "updates_per_iteration": 2, **run["data"]})
    trainer.fit(module, datamodule=data, ckpt_path=start)
    trainer.save_checkpoint(folder / f"{run['name']}.ckpt")
    if trainer.is_global_zero:
        torch.save(
            {name: float(value) for name, value in trainer.callback_metrics.items()}, folder / f"{run['name']}.pt"
        )


def main(spec):
    exec("\n".join(SMALL_PICTURES), {})
    for each in spec["runs"]:
        print(each, flush=True)
        if "policy" in each:
            train_family(each, Path(spec["folder"]))
        else:
            train(each, Path(spec["folder"]), spec["sd3"])


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
