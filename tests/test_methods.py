"""Every method through the same Trainer: what it costs, that it trains, and that it resumes."""

import os
from contextlib import nullcontext

import pytest
import torch
from all_methods import METHODS, SHARED, VARIANTS, S
from helpers import make_data, make_module, make_trainer, repeating, weights
from lightning.pytorch.plugins import MixedPrecision

from lit_vgrpo import AWM, DDPO, DGPO, VGRPO, DiffusionNFT, MixGRPO, RolloutSpec, SD3Policy, UNetPolicy
from lit_vgrpo.callbacks import EMA
from lit_vgrpo.core.sizes import Sizes, group_layout
from lit_vgrpo.data.datasets import IterationDataset
from lit_vgrpo.data.prompt_sets import PromptMixture

ON_UNET = {
    "V-GRPO": (lambda: VGRPO(RolloutSpec("ddim", S)), 1, (S, 4, 0)),
    "DDPO": (lambda: DDPO(RolloutSpec("ddim_sde", S)), 1, (S, S - 1, 0)),
    "DiffusionNFT": (lambda: DiffusionNFT(RolloutSpec("ddim", S)), 1, (S, S - 1, 2 * (S - 1))),
    "DGPO": (lambda: DGPO(RolloutSpec("dpm++", S), noisiest=5), 1, (S, 4, 8)),
}


def run(folder, tmp_path, make, updates, iterations=1, policy=None, ckpt=None, **data):
    module = make_module(folder, make(), policy=policy)
    trainer = make_trainer(tmp_path, iterations)
    sizes = {"heldout_limit": 1, "updates_per_iteration": updates, **data}
    trainer.fit(module, datamodule=make_data(**sizes), ckpt_path=ckpt)
    return module, trainer


def paid(module):
    """Passes an image: rollout, with gradient, without."""
    counts = module.ledger.training_counts()
    rollout = counts.pop("rollout")
    assert rollout["with_grad"] == 0
    update = [sum(count[kind] for count in counts.values()) for kind in ("with_grad", "without_grad")]
    return tuple(total / module.ledger.images for total in (rollout["without_grad"], *update))


def check_costs(module, trainer, expected):
    assert paid(module) == expected
    counts = module.ledger.training_counts()
    planned = module.objective.passes_per_image(trainer.datamodule.sizes)
    assert planned == {phase: sum(count.values()) / module.ledger.images for phase, count in counts.items()}


ALIKE = (
    *("V-GRPO, three steps", "MixGRPO, window 4", "DanceGRPO", "Flow-GRPO, fast"),
    *("DGPO, no guidance", "EPG", "MixGRPO, anchor", "RAM, pure noise", "FlowBP"),
)
"""Methods that keep no other weights, or the same as another: with an adapter they cost as without."""
TRAINED = [(name, "full") for name in METHODS if name not in VARIANTS]
ADAPTED = [(name, "lora") for name in METHODS if name not in ALIKE]
BY_GRADIENT = ("FlowBP", "ReFL", "DRaFT-K", "DRaFT-LV")
# A pretended GPU loses the device of what the VAE's backward pass computes again.
if os.environ.get("PRETEND_GPU") and not torch.cuda.is_available():
    TRAINED, ADAPTED = ([case for case in cases if case[0] not in BY_GRADIENT] for cases in (TRAINED, ADAPTED))
FIRST = [(name, "lora") for name in ("V-GRPO, one step", "DiffusionNFT", "AWM, anchor", "Flow-GRPO, guidance, KL")]
"""No other weights, a copy, an anchor, the start; the other adapters are slow."""


@pytest.mark.parametrize(
    ("name", "trained"), repeating(TRAINED + ADAPTED, slow=[case for case in ADAPTED if case not in FIRST])
)
def test_costs_what_the_table_says_and_moves_the_weights(tiny_sd3, tmp_path, name, trained):
    make, updates, expected = METHODS[name]
    policy = SD3Policy(str(tiny_sd3), max_sequence_length=1, lora_rank=2 if trained == "lora" else None)
    module, trainer = run(tiny_sd3, tmp_path, make, updates, policy=policy)
    check_costs(module, trainer, expected)
    moved = [not torch.equal(p.cpu(), module.reference.tensors[n].cpu()) for n, p in weights(module).items()]
    assert sum(moved) >= len(moved) / 2 - 1


VP = [("V-GRPO", "epsilon"), ("DDPO", "epsilon"), ("DiffusionNFT", "v_prediction"), ("DGPO", "epsilon")]


@pytest.mark.parametrize(
    ("name", "prediction"), repeating([*VP, ("V-GRPO", "v_prediction")], slow=[*VP[2:], ("V-GRPO", "v_prediction")])
)
def test_the_same_on_the_variance_preserving_path(unet_folder, tmp_path, name, prediction):
    folder = unet_folder(prediction)
    make, updates, expected = ON_UNET[name]
    module, trainer = run(folder, tmp_path, make, updates, policy=UNetPolicy(str(folder)))
    check_costs(module, trainer, expected)
    assert all(value.isfinite().all() for value in weights(module).values())


@pytest.mark.parametrize("method", [VGRPO, AWM])
def test_split_updates_pay_for_the_old_policy_after_the_first(tiny_sd3, tmp_path, method):
    def make():
        return method(RolloutSpec(steps=2), 2)

    module, trainer = run(tiny_sd3, tmp_path, make, 2, split_updates=True)
    assert trainer.global_step == 2
    counts = module.ledger.training_counts()
    assert sum(counts["old"].values()) == 2 * module.ledger.images / 2
    planned = module.objective.passes_per_image(trainer.datamodule.sizes)
    assert planned == {phase: sum(count.values()) / module.ledger.images for phase, count in counts.items()}
    deviation = torch.cat(module.record.metrics["ratio_deviation"])
    assert deviation[: len(deviation) // 2].max() == 0 < deviation[len(deviation) // 2 :].max()


@pytest.mark.parametrize(
    ("prompts", "group", "ranks"),
    [(8, 3, [1, 2, 4]), (3, 4, [1, 3, 6]), (1, 4, [1, 2]), (5, 3, [1])],
    ids=["whole groups", "cut groups", "one group", "neither divides"],
)
def test_an_update_takes_the_same_images_on_any_number_of_ranks(prompts, group, ranks):
    updates = 3 if prompts == 5 else 2
    sizes = Sizes(prompts, group, updates, 1, split_updates=True)
    found = []
    for world in ranks:
        shares = [set() for _ in range(updates)]
        for rank in range(world):
            batch = IterationDataset(PromptMixture([[{"prompt": "a"}]]), sizes, world, rank)[0]
            _, ids = group_layout(batch.slots, group, batch.members)
            for share, part in zip(shares, ids[batch.order].chunk(updates), strict=True):
                share |= set(part.tolist())
        assert sum(map(len, shares)) == prompts * group
        found.append(shares)
    assert all(shares == found[0] for shares in found)


def test_a_split_iteration_trains_every_image_with_its_own_values(tiny_sd3, tmp_path):
    def make():
        return MixGRPO(RolloutSpec(**SHARED), window_size=4)

    module, _ = run(tiny_sd3, tmp_path, make, 2, split_updates=True, prompts_per_iteration=4, micro_batch_size=2)
    assert module.record.local_group_ids.tolist() == [0] * 4 + [2] * 4 + [1] * 4 + [3] * 4
    deviation = torch.cat(module.record.metrics["ratio_deviation"])
    assert len(deviation) == 16
    assert deviation[:8].max() < 1e-6 < deviation[8:].min()


class Scaled(MixedPrecision):
    """A gradient scaler on the CPU, without the half precision that needs one."""

    def __init__(self):
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**120))

    def forward_context(self):
        return nullcontext()


class Loud:
    def loss(self, policy, micro):
        loss, metrics = super().loss(policy, micro)
        return 1e9 * loss, metrics


OVERFLOWING = {
    "old": (DGPO, RolloutSpec("dpm++", S), {"noisiest": 5, "old_decay": 0.2}),
    "anchor": (VGRPO, RolloutSpec(steps=2), {"anchor_weight": 1.0, "anchor_decay": 0.3}),
}


@pytest.mark.parametrize("copy", OVERFLOWING)
def test_a_step_that_the_scaler_skips_moves_no_clock(tiny_sd3, tmp_path, copy):
    method, rollout, options = OVERFLOWING[copy]
    objective = type("Overflowing", (Loud, method), {})(rollout, **options)
    module, ema = make_module(tiny_sd3, objective), EMA(0.5)
    trainer = make_trainer(tmp_path, 1, [ema], plugins=[Scaled()])
    trainer.fit(module, datamodule=make_data(heldout_limit=1, updates_per_iteration=2))
    assert trainer.precision_plugin.scaler.get_scale() == 2.0**118  # halved twice
    assert (module.objective.num_updates, ema.num_updates) == (0, 0)
    for name, tensor in module.objective.copies[copy].tensors.items():
        assert torch.equal(tensor.cpu(), module.reference.tensors[name].cpu())


@pytest.mark.slow
def test_a_checkpoint_of_another_method_is_refused_and_holds_no_reference(tiny_sd3, tmp_path):
    _, trainer = run(tiny_sd3, tmp_path, METHODS["DiffusionNFT"][0], 1)
    trainer.save_checkpoint(tmp_path / "nft.ckpt")
    saved = torch.load(tmp_path / "nft.ckpt", weights_only=True)["lit_vgrpo"]["objective"]
    assert saved.keys() == {"num_updates", "copies"}
    assert saved["copies"].keys() == {"old"}
    with pytest.raises(RuntimeError, match=r"copies of the weights \(old\) that differ from those of AWM \(ema\)"):
        run(tiny_sd3, tmp_path, METHODS["AWM"][0], 1, iterations=2, ckpt=tmp_path / "nft.ckpt")
