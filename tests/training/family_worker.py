"""One iteration of each model family under one strategy after the other: ``family_worker.py SPEC.json``.

A run is ``{name, policy, options, lora, strategy, data}``, of which ``data`` are options of the data module; it leaves
``NAME.ckpt`` and what was trained in ``NAME-export``.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from helpers import SMALL_PICTURES, Brightness, make_data, make_trainer

from lit_vgrpo import VGRPO, OptimizerConfig, RolloutSpec, VGRPOModule, policies
from lit_vgrpo.callbacks import EMA, Export


class Coarse(Brightness):
    """Blind to the one pixel that float error rounds to another byte: random pictures differ by little more."""

    def __call__(self, images, prompts, rows):
        return (4000 * super().__call__(images, prompts, rows)).round()


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


def train(run, folder):
    policy = stirred(getattr(policies, run["policy"]))(**run["options"], lora_rank=8 if run["lora"] else None)
    module = VGRPOModule(
        policy,
        VGRPO(RolloutSpec(policy.solvers[0], steps=2, guidance=2.0), num_mc_samples=2, kl_weight=0.5),
        Coarse(),
        # A larger eps: Adam would make a whole step of a gradient of 1e-7, of which a tenth is rounding noise.
        optimizer=OptimizerConfig(lr=2e-4 if run["lora"] else 2e-5, warmup_steps=0, eps=1e-5),
        rollout_batch_size=2,
    )
    callbacks = [EMA(0.8, warmup=False), Export(f"{run['name']}-export")]
    world = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = {"strategy": run["strategy"]} if run["strategy"] else {}
    trainer = make_trainer(folder, 1, callbacks, devices=world, gradient_clip_val=0.05, **chosen)
    trainer.fit(module, datamodule=make_data(micro_batch_size=2, updates_per_iteration=2, **run["data"]))
    trainer.save_checkpoint(folder / f"{run['name']}.ckpt")


def main(spec):
    exec("\n".join(SMALL_PICTURES), {})
    for each in spec["runs"]:
        print(each, flush=True)
        train(each, Path(spec["folder"]))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
