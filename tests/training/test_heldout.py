"""Images of given prompts in a Trainer of one's own: validate, test, predict."""

import math

import pytest
import torch
from helpers import Brightness, make_data, make_module, make_trainer, weights
from torch.utils.data import DataLoader

from lit_vgrpo.callbacks import EMA
from lit_vgrpo.rewards import Reward


class Fails(Reward):
    name = "fails"

    def __call__(self, images, prompts, rows):
        raise RuntimeError("the model has no head")


def test_validate_scores_and_leaves_everything_fit_for_training(tiny_sd3, tmp_path):
    module, data = make_module(tiny_sd3), make_data()
    (found,) = make_trainer(tmp_path).validate(module, datamodule=data, verbose=False)
    assert found["heldout/failed"] == 0
    assert math.isfinite(found["heldout/reward"])
    # Embeddings are kept, and inference mode would have made them useless for a backward pass.
    prompts = [row["prompt"] for row in data.heldout_rows()]
    loader = data.val_dataloader()
    assert [prompt for batch in loader for prompt in batch.prompts] == prompts
    before = weights(module)
    data = make_data(train="shipped:prompts/shapes_heldout.jsonl", heldout=None, heldout_limit=None)
    with pytest.warns(UserWarning, match="No prompts are held out.* Set data.heldout") as said:
        make_trainer(tmp_path, 1).fit(module, datamodule=data)
    assert sum("held out" in str(one.message) for one in said) == 1
    assert any(not torch.equal(value, before[name]) for name, value in weights(module).items())


def test_a_held_out_reward_that_fails_says_why(tiny_sd3, tmp_path):
    module = make_module(tiny_sd3, untrained_reward=Fails())
    with pytest.warns(UserWarning, match='Reward "fails" failed for all 2 held-out images: .*has no head'):
        (found,) = make_trainer(tmp_path).validate(module, datamodule=make_data(), verbose=False)
    assert found["heldout/failed"] == 2
    assert math.isnan(found["heldout/fails"])
    of_fails = {"heldout/untrained_reward": 1, "heldout/fails": 1}
    assert module.evaluator.failed_shares == {"heldout/reward": 0, f"heldout/{Brightness.name}": 0, **of_fails}


@pytest.mark.slow
def test_test_repeats_the_evaluation_with_the_average_and_changes_nothing(tiny_sd3, tmp_path):
    module, ema = make_module(tiny_sd3), EMA(0.5)
    trainer = make_trainer(tmp_path, 2, [ema])
    trainer.fit(module, datamodule=make_data())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    end, evaluations, trained = dict(module.evaluator.latest), len(module.evaluator.history), weights(module)
    (found,) = trainer.test(module, datamodule=make_data(), verbose=False)
    assert found == {name.replace("heldout/", "test/"): pytest.approx(value) for name, value in end.items()}
    assert (module.evaluator.latest, len(module.evaluator.history)) == (end, evaluations)
    assert all(torch.equal(trained[name], value) for name, value in weights(module).items())
    # From the checkpoint alone, in a new trainer, with the average that it holds.
    fresh = make_module(tiny_sd3)
    (again,) = make_trainer(tmp_path, 1, [EMA(0.5)]).test(
        fresh, datamodule=make_data(), ckpt_path=tmp_path / "end.ckpt", verbose=False
    )
    assert again == pytest.approx(found)
    # Of a checkpoint that was only tested, nothing is left over for a later run.
    make_trainer(tmp_path, 1).fit(fresh, datamodule=make_data())
    assert fresh.evaluator.history[0].iteration == 0
    assert fresh.record.iteration == 0


def test_without_held_out_prompts_the_other_verbs_say_what_to_set(tiny_sd3, tmp_path):
    for verb in ("validate", "test", "predict"):
        with pytest.raises(ValueError, match=f"trainer.{verb} needs held-out prompts. Set data.heldout"):
            getattr(make_trainer(tmp_path), verb)(make_module(tiny_sd3), datamodule=make_data(heldout=None))


def test_predict_returns_images(tiny_sd3, tmp_path):
    module, data = make_module(tiny_sd3), make_data(eval_batch_size=1)
    batches = make_trainer(tmp_path).predict(module, datamodule=data)
    assert [tuple(images.shape) for images in batches] == [(1, 3, 32, 32)] * 2
    prompts = [row["prompt"] for row in data.heldout_rows()]
    expected = module.evaluator.generate(prompts, [0, 1])
    torch.testing.assert_close(torch.cat(batches), expected, rtol=0, atol=1e-5)
    # A loader of texts, its batches cut in another way.
    texts = [*prompts, "a green triangle at the top"]
    (two, one) = make_trainer(tmp_path).predict(module, DataLoader(texts, batch_size=2))
    assert 0 <= two.min() < two.max() <= 1
    torch.testing.assert_close(two, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(one, module.evaluator.generate(texts[2:], [2]), rtol=0, atol=1e-5)
    for batch in ("a cat", {"prompt": ["a cat"]}, [("a cat",), (1,)]):
        with pytest.raises(TypeError, match=r"must be a list of texts, such as \['a cat'\], not [\"'{\[]"):
            module.evaluator.predict(batch)


@pytest.mark.slow
def test_the_first_evaluation_keeps_the_trainers_limit(tiny_sd3, tmp_path):
    for limit, images in ((1, 1), (0.5, 1), (1.0, 2)):
        module = make_module(tiny_sd3, reward=(reward := Counted()))
        trainer = make_trainer(tmp_path, 1, limit_val_batches=limit, check_val_every_n_epoch=5)
        trainer.fit(module, datamodule=make_data(eval_batch_size=1))
        assert reward.seen[:images] == [1] * images
        assert reward.seen[images] == 8


class Counted(Brightness):
    def __init__(self):
        self.seen = []

    def __call__(self, images, prompts, rows):
        self.seen.append(len(images))
        return super().__call__(images, prompts, rows)
