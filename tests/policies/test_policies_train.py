"""One training iteration of every family by every method of its path, through the Trainer."""

import pytest
import torch
from all_methods import COSTS, METHODS, S
from helpers import Brightness, make_data, make_trainer, weights
from policies.families import LARGE

from lit_vgrpo import DDPO, DGPO, VGRPO, DiffusionNFT, OptimizerConfig, RolloutSpec, VGRPOModule

GUIDANCE = 2.0
GUIDED = RolloutSpec("euler", S, GUIDANCE)
ON_FLOW = {name: METHODS[name][:2] for name in (*COSTS, "DanceGRPO")}
ON_VP = {
    "V-GRPO": (lambda: VGRPO(RolloutSpec("ddim", S, GUIDANCE)), 1),
    "DDPO": (lambda: DDPO(RolloutSpec("ddim_sde", S, GUIDANCE)), 1),
    "DiffusionNFT": (lambda: DiffusionNFT(RolloutSpec("ddim", S)), 1),
    "DGPO": (lambda: DGPO(RolloutSpec("dpm++", S), noisiest=5), 1),
}
RUNS = [
    *(("flux", name, *run) for name, run in ON_FLOW.items()),
    *(("sdxl", name, *run) for name, run in ON_VP.items()),
    ("flux", "V-GRPO, guidance", lambda: VGRPO(GUIDED), 1),
    ("flux_cfg", "V-GRPO, guidance", lambda: VGRPO(GUIDED), 1),
    ("sd3_t5", "V-GRPO, guidance", lambda: VGRPO(GUIDED), 1),
    ("sdxl_v", "V-GRPO", *ON_VP["V-GRPO"]),
    ("unet_v", "V-GRPO", *ON_VP["V-GRPO"]),
    ("z_image", "V-GRPO, guidance", lambda: VGRPO(GUIDED), 1),  # others: cli/test_family_runs.py
    *((name, "Flow-GRPO, guidance, KL", *ON_FLOW["Flow-GRPO, guidance, KL"]) for name in LARGE),
]
FIRST = {
    "flux": ("Flow-GRPO, guidance, KL",),
    "sdxl": ("DDPO",),
    "flux_cfg": ("V-GRPO, guidance",),
    "z_image": ("V-GRPO, guidance",),
}
"""Each kind of network and guidance; the other pairs are slow."""


@pytest.mark.parametrize(
    ("name", "make", "updates"),
    [
        pytest.param(name, *run, id=f"{name}-{method}", marks=[pytest.mark.slow] * (method not in FIRST.get(name, ())))
        for name, method, *run in RUNS
    ],
)
def test_an_iteration_moves_the_adapter_at_the_planned_cost(families, tmp_path, name, make, updates):
    policy = families(name).load(lora_rank=2)
    objective = make()
    assert objective.policy_errors(policy) == []
    module = VGRPOModule(policy, objective, Brightness(), optimizer=OptimizerConfig(lr=1e-2))
    trainer = make_trainer(tmp_path, 1)
    data = make_data(heldout_limit=1, updates_per_iteration=updates)
    before = weights(module)
    trainer.fit(module, datamodule=data)

    after = weights(module)
    assert all(value.isfinite().all() for value in after.values())
    moved = [name for name, value in after.items() if not torch.equal(value, before[name])]
    assert len(moved) >= len([name for name in after if "lora_B" in name]) - 1  # one of SD3's is idle
    counts = module.ledger.training_counts()
    planned = module.objective.passes_per_image(data.sizes, policy)
    assert planned == {phase: sum(count.values()) / module.ledger.images for phase, count in counts.items()}
    guided = objective.rollout_spec(0).guidance > 1
    assert planned["rollout"] == S * (2 if guided and not policy.embeds_guidance else 1)
