"""The gradient's signal-to-noise ratio by time."""

import numpy as np
import pytest
import torch
from helpers import fit, read_csv, weights
from lightning.pytorch.loggers import CSVLogger
from pair_methods import prepare

from lit_vgrpo import CRD, VGRPO, FlowGRPO, RolloutSpec, SD3Policy
from lit_vgrpo.callbacks import SurrogateDiagnostics
from lit_vgrpo.objectives import gradient_noise
from lit_vgrpo.objectives.gradient_noise import GradientNoise, snr_by_time
from lit_vgrpo.objectives.pairs import PairPass


def test_the_ratio_in_float64():
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(50, 7, generator=generator) + torch.linspace(0, 2, 7)
    noise = GradientNoise()
    for draw in draws:
        noise.add([draw[:3], draw[3:]])
    values = draws.double().numpy()
    mean, variance = values.mean(0), values.var(0, ddof=1).sum()
    expected = np.sqrt(((mean**2).sum() - variance / 50) / variance)
    assert noise.snr() == pytest.approx(expected, rel=1e-5)
    assert noise.snr(4) == pytest.approx(2 * expected, rel=1e-5)
    noise = GradientNoise()  # a mean that is noise alone is none
    for sign in (1.0, -1.0, 1.0, -1.0):
        noise.add([torch.full((3,), sign)])
    assert noise.snr() == 0


def train(folder, tmp_path, callback, objective=None, **sizes):
    objective, data = objective or VGRPO(RolloutSpec(steps=3), num_mc_samples=2), {"heldout_limit": 1, **sizes}
    logger = {"logger": CSVLogger(tmp_path, name="", version="")}
    module, _ = fit(folder, tmp_path, [callback], 2, data, logger, objective=objective)
    return module, read_csv(tmp_path / "metrics.csv")


@pytest.mark.slow
def test_it_is_logged_by_time_and_changes_nothing(tiny_sd3, tmp_path):
    callback = SurrogateDiagnostics(snr_every_n_iterations=2)
    module, rows = train(tiny_sd3, tmp_path / "with", callback)
    times = module.policy.scheduler_times(module.policy.scheduler("euler", 3)).tolist()
    names = [f"surrogate/snr_t{time:.2f}" for time in times]
    assert times[0] == 1
    logged = [row for row in rows if row.get(names[0])]
    assert [row["epoch"] for row in logged] == ["0"]
    assert all(float(logged[0][name]) >= 0 for name in names)
    assert float(logged[0][names[0]]) > 0
    assert module.ledger.counts["diagnostics"] == {"with_grad": 3 * 8, "without_grad": 0}
    assert "diagnostics" not in module.ledger.training_counts()
    plain, _ = train(tiny_sd3, tmp_path / "without", SurrogateDiagnostics())
    assert all(torch.equal(value, weights(plain)[name]) for name, value in weights(module).items())


@pytest.mark.slow
def test_split_updates_log_the_variation_of_all_images(tiny_sd3, tmp_path):
    _, rows = train(tiny_sd3, tmp_path, SurrogateDiagnostics(), updates_per_iteration=2, split_updates=True)
    assert [row["epoch"] for row in rows if row.get("surrogate/cv_within")] == ["0", "1"]


def test_noise_is_shared_as_in_training(tiny_sd3, monkeypatch):
    policy = SD3Policy(str(tiny_sd3))
    policy.load()
    groups = torch.arange(2).repeat_interleave(3)
    rows = []

    def counted(policy, micro, *given):
        rows.append(len(micro.pairs.noise))
        return PairPass(policy, micro, *given)

    monkeypatch.setattr(gradient_noise, "PairPass", counted)
    for objective, shared in ((VGRPO(share_pairs=False), 3), (VGRPO(), 1), (CRD(), 1)):
        micros = prepare(policy, objective).micro_batches(6)
        snr_by_time(objective, policy, micros, groups, torch.ones(1), 2, (0,))
        assert rows == [shared, shared]
        rows.clear()


def test_a_method_without_pairs_is_refused(tiny_sd3, tmp_path):
    with pytest.raises(ValueError, match="needs a method that trains on pairs, which FlowGRPO does not"):
        train(tiny_sd3, tmp_path, SurrogateDiagnostics(snr_every_n_iterations=1), FlowGRPO(RolloutSpec("flow_sde", 3)))
