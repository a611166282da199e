import json

import lightning as L
import pytest
import torch

from lit_vgrpo.data import PromptDataModule


@pytest.fixture
def files(tmp_path):
    train = tmp_path / "train.jsonl"
    train.write_text("".join(json.dumps({"prompt": f"train {i}", "number": i}) + "\n" for i in range(6)))
    heldout = tmp_path / "heldout.txt"
    heldout.write_text("".join(f"heldout {i}\n" for i in range(5)))
    return {"train": str(train), "heldout": str(heldout)}


def data_module(files, **changes):
    settings = {"prompts_per_iteration": 4, "group_size": 4, "updates_per_iteration": 2, "micro_batch_size": 4}
    return PromptDataModule(**{**files, **settings, **changes})


def test_held_out_images_come_prompt_after_prompt(files):
    data = data_module(files, heldout_images_per_prompt=3, heldout_limit=4, eval_batch_size=5)
    batches = list(data.val_dataloader())
    assert [slot for batch in batches for slot in batch.slots] == list(range(12))
    prompts = [prompt for batch in batches for prompt in batch.prompts]
    assert prompts == [f"heldout {i}" for i in range(4) for _ in range(3)]
    assert max(len(batch.prompts) for batch in batches) <= 5


def test_the_loaders_draw_nothing_from_the_global_generator(files):
    data = data_module(files)
    before = torch.get_rng_state()
    assert len(list(data.train_dataloader())) == 1
    assert len(list(data.val_dataloader())) == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_a_training_loader_keeps_its_sampler_under_two_ranks(files, tmp_path):
    from lightning.pytorch.trainer.connectors.data_connector import _DataConnector

    two = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, default_root_dir=tmp_path)
    data = data_module(files)
    data.trainer = two
    for loader in (data.train_dataloader(), data.val_dataloader()):
        prepared = _DataConnector(two)._prepare_dataloader(loader, shuffle=False, mode=None)
        assert prepared.sampler is loader.sampler
        assert loader.sampler.num_replicas == 2
        assert list(loader.sampler) == list(range(len(loader)))
    assert len(data.train_dataloader()) == 1


def test_check_tells_every_error(files, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    data = data_module({"train": str(tmp_path / "no.txt"), "heldout": str(empty)})
    errors = data.check(world_size=3)
    assert [key in error for key, error in zip(("prompts_per_iteration=4", "no.txt"), errors, strict=True)]
    with pytest.raises(ValueError, match=r"no\.txt does not exist"):
        data.setup()
    assert data_module(files).check(world_size=2) == []


def test_held_out_images_that_do_not_reach_every_rank_are_an_error(files):
    assert data_module(files, prompts_per_iteration=8).check(8) == [
        "5 held-out images cannot be split over 8 ranks. Use heldout_images_per_prompt=2 or more, or fewer ranks."
    ]
