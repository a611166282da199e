"""The same recipe on another number of ranks: the same images, the same rewards, the same weights."""

import shutil
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel
from processes import run_ranks

from lit_vgrpo.system.paths import resolve_path

SCRIPT = Path(__file__).parents[1] / "support" / "ranks.py"
CHECKPOINT = "shipped:assets/tiny_sd3"
TWO = "iterations=2"
THREE_UPDATES, TWO_UPDATES, SPLIT = (
    f"{TWO},updates_per_iteration={words}" for words in ("3", "2", "2,split_updates=true")
)
IDLE = "iterations=3,updates_per_iteration=2"  # the second iteration has nothing to learn
WHOLE = {"V-GRPO, three steps": THREE_UPDATES, "MixGRPO, window 4": SPLIT, "idle": IDLE}
WHOLE_TOO = {"DiffusionNFT": TWO, "DGPO, no guidance": TWO_UPDATES, "AWM": TWO, "V-GRPO, scouts": TWO, "DanceGRPO": TWO}
# Two prompts on four ranks: every group is cut in two.
SMALL = f"{TWO},prompts_per_iteration=2,micro_batch_size=2"
CUT = dict.fromkeys(["DGPO, no guidance", "V-GRPO, scouts"], SMALL)
CUT_TOO = dict.fromkeys(["DiffusionNFT", "V-GRPO, three steps", "DGPO, moving", "AWM"], SMALL)
SHARDED = {"DGPO, moving": TWO_UPDATES}
SHARDED_TOO = {"idle": TWO_UPDATES, "AWM": TWO_UPDATES, "MixGRPO, window 4": SPLIT}
CONTINUED = {"DGPO, moving": TWO_UPDATES}
CONTINUED_TOO = {"V-GRPO, three steps": TWO_UPDATES, "V-GRPO, scouts": TWO_UPDATES, "MixGRPO, window 4": SPLIT}


def slow(*values, name):
    return pytest.param(*values, id=name, marks=pytest.mark.slow)


def train(checkpoint, out, ranks, jobs, strategy="ddp"):
    """Results of each rank, by job; where weights are sharded, rank 0 has them whole."""
    out.mkdir(exist_ok=True)
    words = (f"{name}|{options}" for name, options in jobs.items())
    run_ranks(SCRIPT, checkpoint, out, *words, world=ranks, logs=out, env={"STRATEGY": strategy})
    return {name: [torch.load(out / f"{name}.{rank}.pt", weights_only=True) for rank in range(ranks)] for name in jobs}


@pytest.fixture(scope="module")
def two_blocks(tmp_path_factory):
    """The tiny network without its two middle blocks, which take half the time and show nothing more."""
    whole, folder = resolve_path(CHECKPOINT), tmp_path_factory.mktemp("sd3") / "two_blocks"
    shutil.copytree(whole, folder)
    network = SD3Transformer2DModel.from_pretrained(whole / "transformer")
    del network.transformer_blocks[1:-1]
    network.register_to_config(num_layers=2)
    network.save_pretrained(folder / "transformer")
    return folder


def assert_same(name, one, other, tolerance):
    for key in ("rewards", "images"):
        for a, b in zip(one[key], other[key], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance, msg=lambda m, k=key: f"{name}, {k}: {m}")
    for key in ("weights", "ema"):
        for parameter, value in one[key].items():
            torch.testing.assert_close(other[key][parameter], value, rtol=0, atol=tolerance, msg=f"{name}: {parameter}")


@pytest.mark.parametrize(
    ("ranks", "jobs"),
    [
        pytest.param(2, WHOLE, id="whole groups"),
        slow(4, CUT, name="cut groups"),
        slow(2, WHOLE_TOO, name="whole groups, other methods"),
        slow(4, CUT_TOO, name="cut groups, other methods"),
    ],
)
def test_every_method_does_the_same_work(two_blocks, tmp_path, ranks, jobs):
    alone = train(two_blocks, tmp_path / "alone", 1, jobs)
    together = train(two_blocks, tmp_path / "together", ranks, jobs)
    for name, (one,) in alone.items():
        first, *others = together[name]
        assert (one["ranks"], first["ranks"]) == (1, ranks)
        assert torch.equal(one["groups"], first["groups"])
        assert one["updates"] == first["updates"]
        # what the start's weights draw is the same in every bit; gradients are summed in another order
        assert torch.equal(one["rewards"][0], first["rewards"][0]), name
        assert torch.equal(one["images"][0], first["images"][0]), name
        assert_same(name, one, first, 1e-5)
        for other in others:
            assert_same(name, first, other, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "jobs"),
    [
        slow("zero3", SHARDED, name="zero3"),
        slow("zero3", SHARDED_TOO, name="zero3, other methods"),
        slow("fsdp2", {**SHARDED, **SHARDED_TOO}, name="fsdp2"),
    ],
)
def test_methods_with_copies_of_their_own_do_the_same_work_on_sharded_weights(two_blocks, tmp_path, strategy, jobs):
    alone = train(two_blocks, tmp_path / "alone", 1, jobs)
    together = train(two_blocks, tmp_path / strategy, 2, jobs, strategy)
    for name, (one,) in alone.items():
        first = together[name][0]
        assert (first["ranks"], first["updates"]) == (2, 2 if name == "idle" else 4)
        assert_same(f"{name}, {strategy}", one, first, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [{**CONTINUED, **CONTINUED_TOO}])
def test_the_middle_of_an_iteration_goes_on_with_another_number_of_ranks(two_blocks, tmp_path, jobs):
    jobs = {name: f"{words},middle=1" for name, words in jobs.items()}
    found = {ranks: train(two_blocks, tmp_path / str(ranks), ranks, jobs) for ranks in (1, 2)}
    for before, after in [(2, 1), (1, 2)]:
        out = tmp_path / f"{before} then {after}"
        out.mkdir()
        for name in jobs:
            shutil.copy(tmp_path / str(before) / f"{name}.middle.ckpt", out / f"{name}.ckpt")
        continued = train(two_blocks, out, after, jobs)
        for name in jobs:
            whole, rest = found[1][name][0], continued[name][0]
            assert (rest["ranks"], rest["updates"], len(rest["rewards"])) == (after, 4, 1)
            assert_same(name, {**whole, "rewards": whole["rewards"][1:], "images": whole["images"][2:]}, rest, 1e-5)


@pytest.mark.slow
def test_a_loss_that_is_no_number_on_one_rank_stops_or_skips_on_all(two_blocks, tmp_path):
    found = train(two_blocks, tmp_path / "ranks", 2, dict.fromkeys(["skip", "stop"], "iterations=4"))
    for rank in found["skip"]:
        assert (rank["updates"], rank["skipped"], rank["error"]) == (3, 1, "")
    assert_same("skip", *found["skip"], 0)
    for rank in found["stop"]:
        assert rank["updates"] == 2
        assert rank["error"].startswith("The loss is not finite on rank 1 of 2, in update 1 of iteration 2.")
    assert_same("stop", *found["stop"], 0)
    assert all(value.isfinite().all() for value in found["skip"][0]["weights"].values())
