"""An iteration's CPU time beside Flow-Factory's (github.com/X-GenGroup/Flow-Factory) on the same work.

    git clone https://github.com/X-GenGroup/Flow-Factory
    python benchmarks/flow_factory.py Flow-Factory            # needs imageio and einops as well
    python benchmarks/flow_factory.py Flow-Factory nft dgpo

Both sides train all weights of the tiny SD3 pipeline in float32 on one thread: 8 prompts x 4 images, ten sampling
steps, no guidance, batches of 32 images, brightness as the reward, one optimizer step and an EMA of the weights.
Prompts are encoded before. Prints the CPU time of an iteration (the median, the first two left out), of runs that take
turns, and the images that pass through the network with and without gradient; "compiled" is with ``compile: true``.
Flow-Factory runs as it is, but for its autocast, which would be bfloat16.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch

PROMPTS, GROUP, STEPS, REPEATS = 8, 4, 10, 3
ITERATIONS, WARM_UP = 12, 2
SIDES = ("theirs", "ours", "compiled")
PIPELINE = Path(__file__).parents[1] / "recipes/assets/tiny_sd3"
THEIRS: dict[str, dict[str, Any]] = {
    "nft": {"num_train_timesteps": 4, "off_policy": False, "time_sampling_strategy": "discrete", "timestep_range": 0.9},
    "awm": {"num_train_timesteps": 4, "off_policy": False, "time_sampling_strategy": "discrete", "timestep_range": 0.9,
            "ema_kl_beta": 0.0, "kl_beta": 0.0},
    "dgpo": {"num_train_timesteps": 4, "off_policy": False, "time_sampling_strategy": "discrete", "timestep_range": 0.6,
             "kl_beta": 0.02, "dpo_beta": 100},
    "grpo": {"kl_beta": 0.0, "clip_range": 1e-4},
}  # fmt: skip
OURS = {
    "nft": ["model.objective=DiffusionNFT", "model.objective.num_times=4", "model.objective.old_decay=0",
            "model.objective.kl_weight=0"],
    "awm": ["model.objective=AWM", "model.objective.num_times=4", "model.objective.ema_weight=0",
            "model.objective.kl_weight=0"],
    "dgpo": ["model.objective=DGPO", "model.objective.num_times=4", "model.objective.kl_weight=0.02"],
    "grpo": ["model.objective=FlowGRPO", "model.objective.kl_weight=0", "model.objective.reuse_rollout=true"],
}  # fmt: skip


class Laps:
    """CPU time per iteration, and images through the network."""

    def __init__(self, network: torch.nn.Module) -> None:
        self.times: list[float] = []
        self.images: Counter[str] = Counter()
        network.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, network: Any, args: Any, kwargs: Any) -> None:
        images = kwargs.get("hidden_states", args[0] if args else None)
        self.images["with gradient" if torch.is_grad_enabled() else "without"] += len(images)

    def mark(self) -> None:
        self.times.append(time.process_time())

    def result(self) -> dict[str, Any]:
        laps = [end - start for start, end in zip(self.times, self.times[1:], strict=False)][WARM_UP:]
        per_iteration = {name: count / (len(self.times) - 1) for name, count in self.images.items()}
        return {"seconds": statistics.median(laps), "images": per_iteration}


def run_theirs(clone: Path, method: str, folder: Path) -> dict[str, Any]:
    """Run Flow-Factory's trainer."""
    sys.path.insert(0, str(clone / "src"))
    from diffusers import StableDiffusion3Pipeline
    from flow_factory.hparams import Arguments
    from flow_factory.models.stable_diffusion.sd3_5 import SD3_5Adapter
    from flow_factory.rewards.abc import PointwiseRewardModel, RewardModelOutput
    from flow_factory.trainers import load_trainer

    class Brightness(PointwiseRewardModel):
        use_tensor_inputs = True

        def __call__(self, prompt: list[str], image: Any = None, **others: Any) -> Any:
            return RewardModelOutput(rewards=torch.stack(list(image)).mean((1, 2, 3)), extra_info={})

    module = types.ModuleType("brightness")
    module.Brightness = Brightness  # type: ignore[attr-defined]
    sys.modules["brightness"] = module

    def load_pipeline(adapter: Any) -> Any:
        pipeline = StableDiffusion3Pipeline.from_pretrained(PIPELINE, text_encoder_3=None, tokenizer_3=None)
        pipeline.encode_prompt = partial(pipeline.encode_prompt, max_sequence_length=1)
        pipeline.tokenizer_3 = pipeline.tokenizer_2  # only its ids are kept
        return pipeline

    SD3_5Adapter.load_pipeline = load_pipeline
    prompts = Path(__file__).parents[1] / "recipes/prompts/shapes_train.jsonl"
    texts = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()][:64]
    (folder / "train.txt").write_text("\n".join(texts))
    shape = {"resolution": 32, "guidance_scale": 1.0, "num_inference_steps": STEPS}
    config = {
        "mixed_precision": "no",
        "data": {"dataset_dir": str(folder), "cache_dir": str(folder / "cache"), "dataloader_num_workers": 0},
        "model": {"finetune_type": "full", "target_modules": "all", "model_name_or_path": str(PIPELINE),
                  "model_type": "sd3-5", "master_weight_dtype": "fp32"},
        "log": {"logging_backend": "none", "save_dir": str(folder / "saves"), "save_freq": 0, "verbose": False},
        "train": {"trainer_type": method, "per_device_batch_size": PROMPTS * GROUP, "group_size": GROUP,
                  "unique_sample_num_per_epoch": PROMPTS, "gradient_step_per_epoch": 1, "learning_rate": 1e-4,
                  "max_epochs": ITERATIONS, "ema_decay": 0.9, "ema_device": "cpu", "ref_param_device": "cpu",
                  "latent_storage_dtype": "fp32", **shape, **THEIRS[method]},
        "scheduler": {"dynamics_type": "Flow-SDE", "noise_level": 0.7, "sde_steps": list(range(STEPS - 1)),
         "num_sde_steps": STEPS - 1}
        if method == "grpo"
        else {"dynamics_type": "ODE"},
        "eval": {"eval_freq": 0, **shape},
        "rewards": [{"name": "brightness", "reward_model": "brightness.Brightness", "batch_size": 32,
                     "device": "cpu", "dtype": "float32"}],
    }  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    trainer = load_trainer(Arguments.load_from_yaml(str(path)))
    trainer.autocast = contextlib.nullcontext
    laps, sample = Laps(trainer.adapter.pipeline.transformer), trainer.sample

    def timed_sample() -> Any:
        laps.mark()
        return sample()

    trainer.sample = timed_sample
    trainer.start()
    laps.mark()
    return laps.result()


def run_ours(method: str, folder: Path, compiled: bool) -> dict[str, Any]:
    """Run our recipe with the same sizes."""
    import lightning as L

    from lit_vgrpo.launch.build import build

    (folder / "brightness.py").write_text("def score(images, prompts):\n    return images.mean((1, 2, 3))\n")
    sys.path.insert(0, str(folder))
    solver = "flow_sde" if method == "grpo" else "euler"
    cli = build([
        "tiny_shapes", *OURS[method], f"model.objective.rollout.solver={solver}",
        f"model.objective.rollout.steps={STEPS}", "model.objective.rollout.guidance=1", "model.reward=PythonReward",
        "model.reward.function=brightness:score", "model.rollout_batch_size=32", "model.optimizer.lr=1e-4",
        f"data.prompts_per_iteration={PROMPTS}", f"data.group_size={GROUP}", "data.micro_batch_size=32",
        "data.heldout=null", f"trainer.max_epochs={ITERATIONS}", f"run_dir={folder}/run",
        f"model.policy.compile={str(compiled).lower()}",
    ])  # fmt: skip
    cli.trainer.callbacks = [c for c in cli.trainer.callbacks if type(c).__name__ not in ("SampleGrid", "Export")]

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            laps.append(Laps(module.policy.network)) if not laps else None
            laps[0].mark()

        def on_train_end(self, trainer: Any, module: Any) -> None:
            laps[0].mark()

    laps: list[Laps] = []
    cli.trainer.callbacks.insert(0, Watch())
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    return laps[0].result()


def main(clone: str, *methods: str) -> None:
    images = "images with, without gradient"
    print(
        f"| method | theirs, CPU ms | ours | compiled | theirs / ours | theirs / compiled | {images}: theirs | ours |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for method in methods or tuple(THEIRS):
        rows = [[_child(side, clone, method) for side in SIDES] for _ in range(REPEATS)]
        times = [f"{statistics.median(row[i]['seconds'] for row in rows) * 1000:.0f}" for i in range(3)]
        ratios = [f"{statistics.median(row[0]['seconds'] / row[i]['seconds'] for row in rows):.2f}" for i in (1, 2)]
        kinds = ("with gradient", "without")
        passes = [", ".join(f"{side['images'].get(kind, 0):.0f}" for kind in kinds) for side in rows[0][:2]]
        print("| " + " | ".join([method, *times, *ratios, *passes]) + " |", flush=True)


def _child(side: str, clone: str, method: str) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, side, clone, method]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{side} {method} failed\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    if sys.argv[1] in SIDES:
        side, clone, method = sys.argv[1:]
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as scratch:
            if side == "theirs":
                made = run_theirs(Path(clone), method, Path(scratch))
            else:
                made = run_ours(method, Path(scratch), side == "compiled")
        print(json.dumps(made))
    else:
        main(*sys.argv[1:])
