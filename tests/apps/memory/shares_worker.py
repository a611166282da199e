"""A short run under each strategy, and the bytes of it that are alive: ``shares_worker.py SPEC.json``.

A run is ``{name, strategy, policy}``; rank 0 leaves ``NAME.json`` with what was counted and what was estimated.
"""

import gc
import json
import os
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

import lightning as L
import torch
from helpers import make_data, make_module, make_trainer
from torch.distributed.tensor import DTensor

from lit_vgrpo import OptimizerConfig
from lit_vgrpo.apps.memory.estimate import Pass, peak_of_pass
from lit_vgrpo.apps.memory.shares import shares, tensors_of
from lit_vgrpo.policies.meta import policy_on_meta
from lit_vgrpo.training.memory_passes import LiveMemory
from lit_vgrpo.training.strategies import FSDP2, ZeRO

BUCKET = 100_000
STRATEGIES = {
    "ddp": lambda: "ddp",
    "fsdp2": FSDP2,
    **{f"zero{stage}": lambda stage=stage: ZeRO(stage, bucket_size=BUCKET) for stage in (1, 2)},
    "zero3": lambda: ZeRO(3, bucket_size=BUCKET, zero_options={"stage3_max_reuse_distance": 0}),
}


def storages():
    """Of all tensors that Python holds."""
    found = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and one.device.type == "cpu":
            storage = (one._local_tensor if isinstance(one, DTensor) else one).untyped_storage()
            found[storage._cdata] = storage
    return found


class Count(L.Callback):
    """Counts the storages of an update of two micro-batches, without encoders, the embeddings kept of them, and VAE."""

    def __init__(self, live):
        self.live, self._offset = live, 0
        self.seen = {}
        self._old = storages()  # DeepSpeed leaves some of a run before; kept, so that no new one gets their place

    def _alive(self, module):
        pipeline = module.policy.pipeline
        apart = [t for part in (*module.policy.encoders(), pipeline.vae) for t in tensors_of(part)]
        apart += [t for row in module.policy.prompt_encoder._recent.values() for t in row.values()]
        left_out = self._old.keys() | {tensor.untyped_storage()._cdata for tensor in apart}
        gc.collect()  # what an earlier run left in cycles
        found = {place: seen() for place, seen in self.live._storages.items()}  # what only C++ holds, too
        found |= storages()
        return sum(
            s.nbytes() for p, s in found.items() if s is not None and p not in left_out and s.device.type == "cpu"
        )

    def on_fit_start(self, trainer, pl_module):
        loss = pl_module.objective.loss

        def counted(policy, micro):
            passed = len(pl_module.record.metrics.get("loss", ()))
            if trainer.current_epoch == 1 and passed == 1:  # between two micro-batches
                self.seen["after 0"] = start = self._alive(pl_module)
                self.live.peak, self._offset = self.live.live, start - self.live.live
            return loss(policy, micro)

        pl_module.objective.loss = counted

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen["peak"] = self._offset + self.live.peak


def estimated(run, sd3):
    module = make_module(sd3, policy_options=run["policy"], optimizer=OptimizerConfig(lr=1e-4))
    twin = policy_on_meta(module.policy, "cpu")
    return module, twin, peak_of_pass(twin, Pass(8, 1.0, True))


def train(run, folder, module, twin, activations):
    world = int(os.environ["WORLD_SIZE"])
    with LiveMemory() as live:
        count = Count(live)
        trainer = make_trainer(folder, 2, [count], devices=world, strategy=STRATEGIES[run["strategy"]]())
        trainer.fit(module, datamodule=make_data(prompts_per_iteration=4, heldout_limit=2))
    own = shares(twin, OptimizerConfig(), trainer.strategy, world, on_gpu=False)
    whole = shares(twin, OptimizerConfig(), None, 1, on_gpu=False)
    result = {"counted": count.seen, "parts": own.parts, "trained": whole.trained, "activations": activations}
    if trainer.is_global_zero:
        (folder / f"{run['name']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    gc.freeze()  # what was imported, which would be looked through again and again
    spec = json.loads(Path(sys.argv[1]).read_text())
    prepared = [estimated(each, spec["sd3"]) for each in spec["runs"]]  # before ZeRO-3 patches torch, for good
    for each in spec["runs"]:
        print(each, flush=True)
        train(each, Path(spec["folder"]), *prepared.pop(0))
        gc.collect()
