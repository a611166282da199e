"""Strategies by name, and those that are refused."""

from pathlib import Path

import lightning as L
import pytest
import yaml
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, StrategyRegistry
from torch import nn

from lit_vgrpo.fsdp import _blocks
from lit_vgrpo.strategies import FSDP2, ZeRO, strategy_fault
from lit_vgrpo.tiny.build import build_sd3

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


def test_no_stage_four():
    with pytest.raises(ValueError, match="ZeRO stage=4 does not exist. Use 1, 2 or 3"):
        ZeRO(4)


@pytest.mark.parametrize(
    ("strategy", "ours"), [(DeepSpeedStrategy, "zero2"), (ModelParallelStrategy, "fsdp2")], ids=["deepspeed", "mesh"]
)
def test_strategies_without_portable_checkpoints_are_refused(strategy, ours):
    fault = strategy_fault(strategy())
    assert fault is not None
    assert fault.startswith(f"trainer.strategy={strategy.__name__} writes checkpoints that only it can read. ")
    assert fault.endswith(f"Use trainer.strategy={ours}.")


@pytest.mark.parametrize("name", ["zero2", "fsdp2"])
def test_a_precision_that_casts_is_refused(name):
    trainer = L.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False, precision="bf16-true")
    fault = strategy_fault(trainer.strategy)
    assert fault is not None
    assert fault.startswith("trainer.precision=bf16-true would cast the trained weights under ")
    assert "model.policy.dtype=bfloat16" in fault


@pytest.mark.parametrize("strategy", [DDPStrategy, FSDP2, ZeRO])
def test_others_are_not_refused(strategy):
    assert strategy_fault(strategy()) is None


def test_blocks_are_the_outermost_of_their_classes():
    class Inner(nn.Sequential):
        pass

    class Net(nn.Module):
        _no_split_modules = ["Inner"]

        def __init__(self):
            super().__init__()
            self.first = Inner(Inner(nn.Linear(1, 1)))
            self.rest = nn.ModuleList([Inner(), nn.Linear(1, 1)])

    net = Net()
    assert _blocks(net) == [net.first, net.rest[0]]


def test_blocks_of_an_sd3(tmp_path):
    from diffusers import SD3Transformer2DModel

    network = SD3Transformer2DModel.from_pretrained(build_sd3(tmp_path, small=True), subfolder="transformer")
    assert _blocks(network) == list(network.transformer_blocks)
