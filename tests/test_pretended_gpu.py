"""Errors that CUDA would raise, found on a CPU: every family trains, stops within an iteration and goes on.

PRETEND_GPU=1 python -m pytest tests/test_resume.py    # other tests on the same pretended GPU
"""

import io
from dataclasses import replace

import pytest
import test_methods
import torch
from helpers import Brightness, SaveAt, make_data, make_trainer, weights
from policies.families import make_family
from support.pretended_gpu import pretended_gpu
from torch import nn

from lit_vgrpo import DDPO, VGRPO, DiffusionNFT, FlowGRPO, OptimizerConfig, RolloutSpec, SD3Policy, VGRPOModule
from lit_vgrpo.callbacks import EMA, FID, Export, SampleGrid
from lit_vgrpo.cli.check import reward_errors
from lit_vgrpo.launch.build import build
from lit_vgrpo.policies import AutoPolicy, UNetPolicy

CUDA = torch.device("cuda", 0)
FULL = {"offload_encoders": True, "gradient_checkpointing": True}
LORA = {"lora_rank": 2, "dtype": "bfloat16", "negative_prompt": "a blue square"}
FOLDED = {"lora_rank": 2, "fold_lora": True, "negative_prompt": "a blue square"}
METHODS = {
    "anchor": lambda ode, sde: VGRPO(RolloutSpec(ode, 2), num_mc_samples=2, anchor_weight=1.0, anchor_decay=0.3),
    "nft": lambda ode, sde: DiffusionNFT(RolloutSpec(ode, 2, 2.0)),
    "sde": lambda ode, sde: (FlowGRPO if sde == "flow_sde" else DDPO)(RolloutSpec(sde, 2, 2.0)),
}
CASES = [("sd3", LORA, "sde"), ("unet_eps", FULL, "anchor"), ("flux", FULL, "sde"), ("sdxl", FOLDED, "nft")]


class SaveWithin(SaveAt):
    """Saves after the first micro-batch of the second iteration."""

    def __init__(self, path):
        super().__init__(path, 1, 1)

    def on_after_backward(self, trainer, pl_module):
        super().on_after_backward(trainer, pl_module)
        assert pl_module.policy.device == CUDA


def train(family, policy_options, method, tmp_path, real, features, ckpt=None, **module_options):
    size = {"height": 32, "width": 32}
    policy = family.policy_class(str(family.folder), **{**family.options, **size, **policy_options})
    solvers = ("euler", "flow_sde") if policy.path_kind == "flow" else ("ddim", "ddim_sde")
    options = {"optimizer": OptimizerConfig(lr=1e-2), **module_options}
    module = VGRPOModule(policy, METHODS[method](*solvers), Brightness(), **options)
    ema = EMA(0.5)
    callbacks = [ema, SampleGrid(1, 1), FID(real, features, kid=True), Export(), SaveWithin(tmp_path / "within.ckpt")]
    data = make_data(group_size=2, micro_batch_size=2, heldout_limit=2, eval_batch_size=2)
    trainer = make_trainer(tmp_path, 2, callbacks, accelerator="gpu", devices=1)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt)
    assert all(torch.tensor(value).isfinite() for value in module.evaluator.latest.values())
    assert any((tmp_path / "export").iterdir())
    return {**weights(module), **{f"ema {name}": value for name, value in ema.average.tensors.items()}}


@pytest.fixture(scope="session")
def make(sd3_folder, unet_folder, sdxl_folder, flux_folder, large_folder):
    return lambda name: make_family(name, sd3_folder, unet_folder, sdxl_folder, flux_folder, large_folder)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "method"), CASES)
@pytest.mark.filterwarnings("ignore:FID of")
def test_trains_stops_within_an_iteration_and_goes_on(make, real, tiny_clip, tmp_path, name, options, method):
    family = make(name)
    with pretended_gpu():
        home = "cpu" if name.startswith("unet") else None
        arguments = family, options, method, tmp_path, real, str(tiny_clip)
        whole = train(*arguments, rollout_device=home)
        saved = torch.load(tmp_path / "within.ckpt", weights_only=True)
        resumed = train(*arguments, ckpt=tmp_path / "within.ckpt", rollout_device=home)
        assert all(torch.equal(value, resumed[key]) for key, value in whole.items())
    iteration = saved["lit_vgrpo"]["iteration"]
    assert iteration["latents"].device == iteration["rows"].device == torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("sd3", SD3Policy), ("sd3_t5", AutoPolicy), ("unet_eps", UNetPolicy)])
@pytest.mark.filterwarnings("ignore:FID of")
def test_a_network_that_waits_trains_as_one_that_stays(make, real, tiny_clip, tmp_path, name, kind):
    family = replace(make(name), policy_class=kind, options={})
    options = {**LORA, "offload_encoders": True}
    with pretended_gpu():
        stays, waits = (
            train(family, {**options, "offload_network": on}, "sde", tmp_path / str(on), real, str(tiny_clip))
            for on in (False, True)
        )
    assert all(torch.equal(value, waits[key]) for key, value in stays.items())


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, 2])
def test_a_gpu_starts_from_the_weights_and_the_noise_of_a_cpu(tiny_sd3, tmp_path, lora):
    def train(accelerator):
        policy = SD3Policy(str(tiny_sd3), max_sequence_length=1, lora_rank=lora)
        module = VGRPOModule(policy, METHODS["sde"]("euler", "flow_sde"), Brightness())
        make_trainer(tmp_path, 1, accelerator=accelerator).fit(module, datamodule=make_data(heldout_limit=1))
        return module.reference.tensors, module.record.rewards

    weights, rewards = train("cpu")
    with pretended_gpu():
        found, found_rewards = train("gpu")
        assert all(torch.equal(value, found[name].cpu()) for name, value in weights.items())
    # a mean over the pixels, of which a few may be rounded to the next grey level
    torch.testing.assert_close(found_rewards, rewards, atol=0.1 / 255, rtol=0)
    assert rewards.std() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _ in test_methods.TRAINED if name not in test_methods.BY_GRADIENT])
def test_every_method_trains_at_its_cost(tiny_sd3, tmp_path, monkeypatch, name):
    monkeypatch.setenv("PRETEND_GPU", "1")  # make_trainer reads it
    with pretended_gpu():
        test_methods.test_costs_what_the_table_says_and_moves_the_weights(tiny_sd3, tmp_path, name, "full")


class Projection(Brightness):
    """A matrix product, which an autocast rounds."""

    def __call__(self, images, prompts, rows):
        return images.flatten(1) @ torch.linspace(0, 1, images[0].numel(), device=images.device)


@pytest.mark.slow
def test_rewards_see_nothing_of_the_trainers_precision(tiny_sd3, tmp_path):
    """Those of an iteration's eight images, and of two held-out ones; 16-mixed rounds the gradients between them."""

    def rewards(precision, dtype="float32"):
        policy = SD3Policy(str(tiny_sd3), max_sequence_length=1, dtype=dtype, lora_rank=2)
        module = VGRPOModule(policy, VGRPO(RolloutSpec("unipc", 4), num_mc_samples=2), Projection())
        with pretended_gpu():
            trainer = make_trainer(tmp_path, 1, accelerator="gpu", precision=precision)
            trainer.fit(module, datamodule=make_data(heldout_limit=2))
            return [*module.record.rewards.tolist(), *module.evaluator.per_image("heldout/reward").tolist()]

    exact = rewards("32-true")
    assert rewards("bf16-mixed", "bfloat16") == rewards("32-true", "bfloat16")
    assert rewards("16-mixed")[:8] == exact[:8]


def test_a_check_calls_rewards_on_the_runs_device(here, monkeypatch):
    monkeypatch.syspath_prepend(here)
    text = "def mean(images, prompts):\n    return torch.from_numpy(images.mean((1, 2, 3)).numpy())\n"
    (here / "on_cpu.py").write_text(f"import torch\n{text}")
    with pretended_gpu():
        cli = build(["tiny_shapes", "trainer.accelerator=gpu", "model.reward={python: on_cpu:mean}"], make_folder=False)
        (error,) = reward_errors(cli)
    assert "can't convert cuda:0 device type tensor to numpy" in error


def test_the_pretended_gpu_is_as_strict_as_cuda():
    mixed, numbers = pytest.raises(RuntimeError, match="to be on the same device"), torch.arange(3.0)
    with pretended_gpu():
        there = numbers.to("cuda")
        for operation in (
            lambda: there + numbers,
            lambda: numbers.add_(there[0]),
            lambda: torch.cat([there[:1], numbers]),
            lambda: torch.stack([there[0], numbers[0]]),
            lambda: nn.functional.linear(there, torch.ones(2, 3)),
            lambda: there.__setitem__(torch.tensor([0, 1]), numbers[:2]),
        ):
            with mixed:
                operation()
        with pytest.raises(RuntimeError, match="indices should be either on cpu"):
            numbers[torch.tensor([0], device="cuda")]
        with pytest.raises(RuntimeError, match="'cuda' device type for generator"):
            torch.randn(2, device="cuda", generator=torch.Generator())
        with pytest.raises(TypeError, match="to numpy"):
            there.numpy()
        there[:2] = numbers[1:]
        assert (there * numbers[2]).cpu().tolist() == [2, 4, 4]
        assert there[torch.tensor([0])].device == there.view(3, 1).device == torch.zeros_like(there).device == CUDA
        assert numbers.tolist() == [0, 1, 2]  # of which a copy went there


def test_the_pretended_gpu_draws_casts_and_saves_as_cuda_does():
    with pretended_gpu():
        torch.manual_seed(0)
        here, there = torch.randn(3), torch.randn(3, device="cuda")
        torch.manual_seed(0)
        assert torch.equal(torch.randn(3, device="cuda"), there)
        assert not torch.equal(there.cpu(), here)
        with torch.device("cuda"):
            layer = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
        with torch.autocast("cuda", torch.bfloat16):
            assert layer[0](there).dtype == torch.bfloat16
            assert layer(there).dtype == torch.float32
            assert nn.Linear(3, 3)(here).dtype == torch.float32
        torch.utils.checkpoint.checkpoint(layer, there, use_reentrant=False).sum().backward()
        assert layer[0].weight.grad.device == CUDA
        torch.save(layer.state_dict(), file := io.BytesIO())
        for place in ("cpu", None):
            file.seek(0)
            loaded = torch.load(file, map_location=place, weights_only=True)
            assert loaded["0.weight"].device == torch.device(place or CUDA)
