"""Not run on Ray. Ray Train starts the ranks, and each trains with Ray's DDP strategy.

RAY_TRAIN_V2_ENABLED=1 python deploy/ray_train.py
Ray places the processes, so this is a Trainer instead of the command; it has no run folder, report or --resume.
"""

import lightning as L
from ray.train import RunConfig, ScalingConfig
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer

from lit_vgrpo import VGRPO, PromptDataModule, RolloutSpec, SD3Policy, VGRPOModule
from lit_vgrpo.rewards import PickScore


def train() -> None:
    """Train one rank."""
    policy = SD3Policy(
        "stabilityai/stable-diffusion-3.5-medium", lora_rank=32, dtype="bfloat16", gradient_checkpointing=True
    )
    module = VGRPOModule(policy, VGRPO(RolloutSpec("euler", steps=40), num_mc_samples=4, soft_clip=3.0), PickScore())
    data = PromptDataModule("/shared/prompts.txt", 48, 24, heldout="/shared/heldout.txt")  # 48 prompts x 24 images
    trainer = L.Trainer(
        max_epochs=150,
        devices="auto",
        accelerator="auto",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
    )
    prepare_trainer(trainer).fit(module, datamodule=data)


TorchTrainer(
    train,
    scaling_config=ScalingConfig(num_workers=8, use_gpu=True),
    run_config=RunConfig(name="lit-vgrpo", storage_path="/shared/ray"),
).fit()
