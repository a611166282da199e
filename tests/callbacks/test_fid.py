import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import fit, make_data, make_module, make_trainer

from lit_vgrpo.callbacks import EMA, FID, RunSummary, averaged_weights
from lit_vgrpo.metrics import FeatureMoments, feature_network, frechet_distance, kernel_distance, reference_statistics
from lit_vgrpo.metrics.looks import LOOKS
from lit_vgrpo.module import VGRPOModule
from lit_vgrpo.system.hub import LoadError

pytestmark = pytest.mark.slow

SAME = 1e-4
"""Of a distance. A grey level of one pixel in every image moves it by less, an image too few or twice by far more."""


def train(folder, tmp_path, callbacks, iterations=2, data=None, **trainer):
    sizes = {"heldout_limit": 4, "heldout_images_per_prompt": 2, "eval_batch_size": 3, **(data or {})}
    return fit(folder, tmp_path, callbacks, iterations, sizes, trainer)


def distances(images, script, real):
    network = feature_network(script)
    reference = reference_statistics(real, network, keep_features=True)
    features, moments = network(images), FeatureMoments(network.dimension)
    moments.update(features)
    fid = frechet_distance(*moments.mean_and_cov(), reference.mean, reference.cov)
    return fid, kernel_distance(features, reference.features)


def test_it_measures_the_held_out_images_of_the_average(tiny_sd3, tmp_path, script, real):
    """The last evaluation is RunSummary's own, after training: it too is of the EMA's weights."""
    callbacks = [EMA(0.7), FID(real, script, kid=True), RunSummary()]
    module, trainer = train(tiny_sd3, tmp_path, callbacks, 3, {"eval_batch_size": 8}, check_val_every_n_epoch=2)
    rows = [row["prompt"] for row in make_data(heldout_limit=4).heldout_rows() for _ in range(2)]
    trained = distances(module.evaluator.generate(rows, list(range(8))), script, real)
    with averaged_weights(trainer, module):
        expected = distances(module.evaluator.generate(rows, list(range(8))), script, real)
    found = module.evaluator.latest["heldout/fid@8"], module.evaluator.latest["heldout/kid@8"]
    assert found == pytest.approx(expected, rel=SAME)
    assert found != pytest.approx(trained, rel=SAME)
    assert {"reward", "brightness", "failed", "fid@8", "kid@8", *LOOKS} == {
        key.removeprefix("heldout/") for key in module.evaluator.latest
    }
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "finished"


def test_no_image_is_sampled_for_it(tiny_sd3, tmp_path, script, real):
    alone, _ = train(tiny_sd3, tmp_path, [], 1, {"heldout_images_per_prompt": 1})
    with pytest.warns(UserWarning, match="FID of 4 images with 6 features is biased upwards"):
        measured, _ = train(tiny_sd3, tmp_path, [FID(real, script)], 1, {"heldout_images_per_prompt": 1})
    assert measured.ledger.counts == alone.ledger.counts
    assert measured.evaluator.latest["heldout/reward"] == alone.evaluator.latest["heldout/reward"]


def test_validation_alone(tiny_sd3, tmp_path, script, real):
    trainer = make_trainer(tmp_path, 1, [FID(real, script)])
    (found,) = trainer.validate(make_module(tiny_sd3), datamodule=make_data(heldout_limit=8), verbose=False)
    assert found["heldout/fid@8"] > 0


def test_images_that_are_not_finite_are_left_out(script, real):
    images = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = distances(images[1:], script, real)
    images[0, 0, 0, 0] = torch.nan
    fid = FID(real, script, kid=True)
    fid.update(images, SimpleNamespace(slots=[*range(5)]))
    found = fid.compute(SimpleNamespace(device=torch.device("cpu")))
    assert found == pytest.approx({"heldout/fid@4": expected[0], "heldout/kid@4": expected[1]})


def test_an_error_ends_the_run_before_training(tiny_sd3, tmp_path, script, real, monkeypatch):
    monkeypatch.setattr(VGRPOModule, "training_step", lambda *_: pytest.fail("it trained"))
    torn = tmp_path / "torn"
    torn.mkdir()
    for index in range(3):
        (torn / f"{index}.png").write_bytes(Path(real, f"{index}.png").read_bytes()[: 60 if index == 2 else None])
    cases = [
        (FID("nowhere", script), {}, ValueError, "reference=nowhere is neither"),
        (FID(str(torn), script), {}, ValueError, "2.png is not a readable image"),
        (FID(real, script), {"heldout": None}, ValueError, "FID needs held-out prompts"),
        (FID(real, str(torn / "0.png") + ".pt"), {}, ValueError, "0.png.pt does not exist"),
    ]
    (torn / "text.pt").write_text("no network")
    cases.append((FID(real, str(torn / "text.pt")), {}, LoadError, "Cannot load .*text.pt"))
    for fid, data, kind, message in cases:
        with pytest.raises(kind, match=message):
            train(tiny_sd3, tmp_path, [fid], data={"heldout_images_per_prompt": 1, **data})
    with pytest.raises(ValueError, match="Two FID callbacks log the same metric. Remove one"):
        train(tiny_sd3, tmp_path, [FID(real, script), FID(real, script)])
