"""The same recipe on another number of ranks: the same images, the same rewards, the same weights."""

import shutil
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel
from processes import run_ranks

from lit_vgrpo.paths import resolve_path

SCRIPT = Path(__file__).with_name("ranks.py")
CHECKPOINT = "shipped:assets/tiny_sd3"
WHOLE = "iterations=3"
# Two prompts on four ranks: every group is cut in two.
CUT = "iterations=2,prompts_per_iteration=2,micro_batch_size=2"
JOBS = {
    "V-GRPO, three steps": "updates_per_iteration=3",
    "MixGRPO, window 4": "updates_per_iteration=2,split_updates=true",
    "DanceGRPO": "",
    "DiffusionNFT": "",
    "DGPO, no guidance": "updates_per_iteration=2",
    "AWM": "",
    "idle": "updates_per_iteration=2",
}
CUT_JOBS = ["V-GRPO, three steps", "DGPO, no guidance", "DGPO, moving", "AWM"]


def train(checkpoint, out, ranks, jobs, strategy="ddp"):
    """What each rank ended with, by job; where weights are sharded, rank 0 has them whole."""
    out.mkdir(exist_ok=True)
    words = (f"{name}|{options}" for name, options in jobs)
    run_ranks(SCRIPT, checkpoint, out, *words, world=ranks, logs=out, env={"STRATEGY": strategy})
    return {
        name: [torch.load(out / f"{name}.{rank}.pt", weights_only=True) for rank in range(ranks)] for name, _ in jobs
    }


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


@pytest.mark.parametrize("ranks", [2, 4], ids=["whole groups", "cut groups"])
def test_every_method_does_the_same_work(two_blocks, tmp_path, ranks):
    if ranks == 2:
        jobs = [(name, f"{WHOLE},{words}") for name, words in JOBS.items()]
    else:
        jobs = [(name, CUT) for name in CUT_JOBS]
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


@pytest.mark.parametrize("strategy", ["zero3", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_methods_with_copies_of_their_own_do_the_same_work_on_sharded_weights(two_blocks, tmp_path, strategy):
    sizes = "iterations=2,updates_per_iteration=2"
    jobs = [("DGPO, moving", sizes), ("AWM", sizes), ("MixGRPO, window 4", f"{sizes},split_updates=true")]
    jobs.append(("idle", sizes))  # the second iteration has nothing to learn
    alone = train(two_blocks, tmp_path / "alone", 1, jobs)
    together = train(two_blocks, tmp_path / strategy, 2, jobs, strategy)
    for name, (one,) in alone.items():
        first = together[name][0]
        assert (first["ranks"], first["updates"]) == (2, 2 if name == "idle" else 4)
        assert_same(f"{name}, {strategy}", one, first, 1e-5)


def test_the_middle_of_an_iteration_goes_on_with_another_number_of_ranks(two_blocks, tmp_path):
    sizes = "iterations=2,updates_per_iteration=2,middle=1"
    jobs = [
        ("V-GRPO, three steps", sizes),
        ("MixGRPO, window 4", f"{sizes},split_updates=true"),
        ("DGPO, moving", sizes),
    ]
    found = {ranks: train(two_blocks, tmp_path / str(ranks), ranks, jobs) for ranks in (1, 2)}
    for before, after in [(2, 1), (1, 2)]:
        out = tmp_path / f"{before} then {after}"
        out.mkdir()
        for name, _ in jobs:
            shutil.copy(tmp_path / str(before) / f"{name}.middle.ckpt", out / f"{name}.ckpt")
        continued = train(two_blocks, out, after, jobs)
        for name, _ in jobs:
            whole, rest = found[1][name][0], continued[name][0]
            assert (rest["ranks"], rest["updates"], len(rest["rewards"])) == (after, 4, 1)
            assert_same(name, {**whole, "rewards": whole["rewards"][1:], "images": whole["images"][2:]}, rest, 1e-5)


def test_a_loss_that_is_no_number_on_one_rank_stops_or_skips_on_all(two_blocks, tmp_path):
    found = train(two_blocks, tmp_path / "ranks", 2, [("skip", "iterations=4"), ("stop", "iterations=4")])
    for rank in found["skip"]:
        assert (rank["updates"], rank["skipped"], rank["error"]) == (3, 1, "")
    assert_same("skip", *found["skip"], 0)
    for rank in found["stop"]:
        assert rank["updates"] == 2
        assert rank["error"].startswith("The loss is not finite on rank 1 of 2, in update 1 of iteration 2.")
    assert_same("stop", *found["stop"], 0)
    assert all(value.isfinite().all() for value in found["skip"][0]["weights"].values())
