"""Strategies by name, and those that are refused."""

import re
from pathlib import Path

import lightning as L
import pytest
import yaml
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy, StrategyRegistry
from torch import nn

from lit_vgrpo import OptimizerConfig, SD3Policy
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.training.sharded import blocks_of
from lit_vgrpo.training.strategies import FSDP2, ZeRO, strategy_errors

OVERLAYS = sorted((Path(__file__).parents[2] / "recipes" / "strategy").glob("*.yaml"))


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_an_overlay_names_its_strategy_and_its_command(overlay):
    text = overlay.read_text()
    strategy = yaml.safe_load(text)["trainer"]["strategy"]
    if isinstance(strategy, dict):
        assert FSDP2(**strategy["init_args"]).mesh_errors() == []
    else:
        assert strategy in StrategyRegistry.available_strategies()
        assert strategy == overlay.stem or overlay.stem == "two_nodes"
    assert re.search(rf"run (sd3|flux2_dev)_pickscore strategy/{overlay.stem}\b", text)


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
    assert [*strategy_errors(strategy(), SD3Policy("any"), OptimizerConfig(), Sizes(1, 2))] == [
        f"trainer.strategy={strategy.__name__} writes checkpoints that only it can read. Use trainer.strategy={ours}."
    ]


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
