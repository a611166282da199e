"""The age of every average of the weights, in recipes and methods, against the published decays.

Read in yifan123/flow_grpo ac4c86e, Luo-Yihong/DGPO 01ceb4b and NVlabs/DiffusionNFT 24af555 (``flow_grpo/ema.py``, the
training scripts), scxue/advantage_weighted_matching be51372 (``dgx_awm.py``, ``train_sd3_awm.py``) and
RuoyuWang-2077/FlowBP 93b220a (``trainers/sd35/leapalign.py``). Unverified, since only a third party's: those of CRD
(X-GenGroup/Flow-Factory a0b2bc5, ``trainers/crd.py``) and RAM.
"""

import pytest
import torch
from omegaconf import OmegaConf

from lit_vgrpo.callbacks import EMA
from lit_vgrpo.core.snapshots import Decay
from lit_vgrpo.objectives import AWM, CRD, DGPO, EPG, RAM, VGRPO, DiffusionNFT
from lit_vgrpo.system.paths import resolve_path


class Clock(torch.nn.Module):
    """Weights that show an average's age: the number of steps done, and 1 once there was a step."""

    def __init__(self):
        super().__init__()
        self.shown, self.objective = torch.nn.Parameter(torch.zeros(2)), VGRPO()
        self.weights_source = object()

    @torch.no_grad()
    def tick(self):
        self.shown.copy_(torch.tensor([self.objective.num_updates + 1.0, 1.0]))
        self.objective.after_update(self)


def age_and_start(average, steps):
    """Return an average's mean age in steps and its share of the starting weights."""
    (shown,) = average.tensors.values()
    return steps - float(shown[0]), 1 - float(shown[1])


def published(decay_at, steps):
    """The same of ``average <- d average + (1 - d) weights`` with ``d = decay_at(n)`` after each step n."""
    clock, moved = 0.0, 0.0
    for n in range(1, steps + 1):
        decay = decay_at(n)
        clock, moved = decay * clock + (1 - decay) * n, decay * moved + 1 - decay
    return steps - clock, 1 - moved


def flow_grpos(decay, interval=1):
    """``EMAModuleWrapper``; its steps count from 0."""
    return lambda n: 1.0 if (n + 1) % interval else min((1 + n) / (10 + n), decay)


RECIPES = {
    **dict.fromkeys(("sd3_pickscore_flowbp", "flux_hps_flowbp"), (lambda n: 0.995, 155, 0.22)),
    "sd3_pickscore_flowgrpo": (flow_grpos(0.9, 8), 75, 0.004),
    "sd3_pickscore_dgpo": (flow_grpos(0.9, 8), 64, 0.03),
    "sd3_pickscore_awm": (flow_grpos(0.99), 15, 0),
    **dict.fromkeys(("sd3_pickscore_nft", "sd3_pickscore", "sd35m_stage1"), (flow_grpos(0.9), 9, 0)),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipes_average_is_as_old_as_the_published_one(name):
    decay_at, age, start = RECIPES[name]
    recipe = OmegaConf.to_container(OmegaConf.load(resolve_path(f"shipped:{name}.yaml")))
    callbacks, clock = recipe["trainer"]["callbacks"], Clock()
    (given,) = (entry["init_args"] for entry in callbacks if isinstance(entry, dict) and entry["class_path"] == "EMA")
    steps, ema = recipe["trainer"]["max_epochs"] * recipe["data"].get("updates_per_iteration", 1), EMA(**given)
    ema.on_fit_start(None, clock)
    ema.on_train_start(None, clock)
    for _ in range(steps):
        clock.tick()
        ema.on_before_zero_grad(None, clock, None)
    found = age_and_start(ema.average, steps)
    assert published(decay_at, steps) == pytest.approx((age, start), abs=0.5)
    assert found[0] == pytest.approx(published(decay_at, steps)[0], abs=1.0)  # a step of the average's eight earlier
    assert found[1] == pytest.approx(published(decay_at, steps)[1], abs=5e-3)


def at_most(most, rate, first=0):
    return lambda n: min(most, rate * max(0, n - first))


TYPE_1, TYPE_2 = at_most(0.5, 0.001), at_most(0.999, 0.0075, 75)
METHODS = {
    "DiffusionNFT": (DiffusionNFT, "old", TYPE_1),
    "DiffusionNFT, type 2": (lambda: DiffusionNFT(old_decay=Decay(rate=0.0075, max=0.999, after=75)), "old", TYPE_2),
    "EPG": (EPG, "old", TYPE_1),
    "AWM": (AWM, "ema", at_most(0.3, 0.001)),
    "DGPO": (DGPO, "old", at_most(0.3, 0.001, 1)),  # it counts steps from 0
    "CRD": (CRD, "old", lambda n: min(0.5, 0.25 + 0.001 * n)),
    "CRD, sampler": (CRD, "sampler", TYPE_1),
    "RAM": (RAM, "old", at_most(0.9, 0.01)),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("steps", [60, 400])
def test_a_methods_copy_is_as_old_as_the_published_one(name, steps):
    (make, copy, decay_at), clock = METHODS[name], Clock()
    clock.objective = make()
    clock.objective.setup(clock)
    for _ in range(steps):  # iterations of one update
        clock.tick()
        clock.objective.after_iteration(clock)
    found = age_and_start(clock.objective.copies[copy], steps)
    assert found == pytest.approx(published(decay_at, steps), rel=0.02, abs=2e-3)
