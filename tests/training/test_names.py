"""Strategies by name, and those that are refused."""

from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel, UNet2DConditionModel
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, StrategyRegistry
from torch import nn

from lit_vgrpo.training.fsdp2 import blocks_of
from lit_vgrpo.training.strategies import FSDP2, ZeRO, strategy_error

OVERLAYS = sorted((Path(__file__).parents[2] / "recipes" / "strategy").glob("*.yaml"))


def test_there_are_overlays():
    assert {path.stem for path in OVERLAYS} >= {"ddp", "zero1", "zero2", "zero3", "zero3_offload", "fsdp2"}


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_an_overlay_names_its_strategy_and_its_command(overlay):
    text = overlay.read_text()
    strategy = yaml.safe_load(text)["trainer"]["strategy"]
    assert strategy in StrategyRegistry.available_strategies()
    assert strategy == overlay.stem or overlay.stem == "two_nodes"
    assert f"run sd3_pickscore strategy/{overlay.stem}" in text


@pytest.mark.parametrize(
    ("name", "stage", "offload"), [("zero1", 1, False), ("zero2_offload", 2, True), ("zero3_offload", 3, True)]
)
def test_names_lead_to_stages(name, stage, offload):
    strategy = L.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False).strategy
    assert isinstance(strategy, ZeRO)
    zero = strategy.config["zero_optimization"]
    assert (zero["stage"], "offload_optimizer" in zero, "offload_param" in zero) == (stage, offload, stage == 3)


@pytest.mark.parametrize(
    ("strategy", "ours"), [(DeepSpeedStrategy, "zero2"), (ModelParallelStrategy, "fsdp2")], ids=["deepspeed", "mesh"]
)
def test_strategies_without_portable_checkpoints_are_refused(strategy, ours):
    error = strategy_error(strategy())
    assert error is not None
    assert error.startswith(f"trainer.strategy={strategy.__name__} writes checkpoints that only it can read. ")
    assert error.endswith(f"Use trainer.strategy={ours}.")


@pytest.mark.parametrize("name", ["zero2", "fsdp2"])
def test_a_precision_that_casts_is_refused(name):
    trainer = L.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False, precision="bf16-true")
    error = strategy_error(trainer.strategy)
    assert error is not None
    assert error.startswith("trainer.precision=bf16-true would cast the trained weights.")
    assert "model.policy.dtype" in error


@pytest.mark.parametrize("strategy", [DDPStrategy, FSDP2, ZeRO])
def test_others_are_not_refused(strategy):
    assert strategy_error(strategy()) is None


def test_blocks_are_the_innermost_of_their_classes():
    class Inner(nn.Sequential):
        pass

    class Net(nn.Module):
        _no_split_modules = ["Inner"]

        def __init__(self):
            super().__init__()
            self.first = Inner(Inner(nn.Linear(1, 1)), nn.Linear(1, 1))
            self.rest = nn.ModuleList([Inner(), nn.Linear(1, 1)])

    net = Net()
    assert blocks_of(net) == [net.first[0], net.rest[0]]


def test_blocks_of_the_transformers(sd3_folder, flux_folder):
    sd3 = SD3Transformer2DModel.from_pretrained(sd3_folder(), subfolder="transformer")
    assert blocks_of(sd3) == list(sd3.transformer_blocks)
    flux = FluxTransformer2DModel.from_pretrained(flux_folder(), subfolder="transformer")
    assert blocks_of(flux) == [*flux.transformer_blocks, *flux.single_transformer_blocks]


def test_no_block_of_sdxl_is_large():
    """All that is gathered at once: one block, and what lies in none, which the whole forward pass needs."""
    with torch.device("meta"):
        unet = UNet2DConditionModel(
            sample_size=128,
            in_channels=4,
            block_out_channels=(320, 640, 1280),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2, 10),
            attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        )
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks_of(unet)]
    whole = sum(p.numel() for p in unet.parameters())
    assert whole == 2_567_463_684  # as published, 2.6 B
    assert max(sizes) < 0.02 * whole
    assert whole - sum(sizes) < 0.05 * whole
