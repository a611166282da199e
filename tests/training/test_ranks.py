"""The same recipe on another number of ranks: the same images, the same rewards, the same weights."""

import runpy
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
WHOLE = {"V-GRPO, replay": TWO_UPDATES}
OTHERS = {
    "V-GRPO, three steps": THREE_UPDATES,
    "MixGRPO, window 4": SPLIT,
    "idle": IDLE,
    "DiffusionNFT": TWO,
    "DGPO, no guidance": TWO_UPDATES,
    "DanceGRPO": TWO,
}
CONTINUED = {
    **dict.fromkeys([*WHOLE, "DGPO, moving", "FlowBP"], f"{TWO_UPDATES},middle=1"),
    "MixGRPO, window 4": f"{SPLIT},middle=1",
    "two sources": f"{TWO_UPDATES},middle=1",
}
CUT = dict.fromkeys(  # one prompt on two ranks, so its group is cut; test_context_parallel.py cuts two on four ranks
    ["DGPO, moving", "CRD", "V-GRPO, replay"],
    f"{TWO_UPDATES},prompts_per_iteration=1,micro_batch_size=2",
)
SHARDED = {  # FSDP2 for each kind of copy; ZeRO-3, which is slower, for methods that read weights while they train
    "fsdp2": dict.fromkeys(["DGPO, moving", "AWM", "V-GRPO, replay", "DRaFT-K", "OPD", "RAM", "CRD"], TWO_UPDATES),
    "zero3": dict.fromkeys(["DGPO, moving", "DRaFT-K"], "iterations=1,updates_per_iteration=2"),
}


def words(jobs, place=".", strategy="ddp"):
    """Jobs by name as ``ranks.py`` reads them."""
    return [f"{place}/{strategy}/{name}|{options}" for name, options in jobs.items()]


def train_alone(checkpoint, out, *jobs):
    """Run jobs on one rank in this process: starting another would take longer than most of them."""
    runpy.run_path(str(SCRIPT))["main"](str(checkpoint), str(out), *jobs)


def results(out, ranks, jobs):
    """Results of each rank, by job; where weights are sharded, rank 0 has them whole."""
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
    for key in ("rewards", "images", "sources"):
        for a, b in zip(one[key], other[key], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance, msg=lambda m, k=key: f"{name}, {k}: {m}")
    for key in ("weights", "ema"):
        for parameter, value in one[key].items():
            torch.testing.assert_close(other[key][parameter], value, rtol=0, atol=tolerance, msg=f"{name}: {parameter}")


def assert_same_work(one, found):
    """The same weights, rewards and images on all ranks as on one."""
    for name, ranks in found.items():
        (alone,), (first, *others) = one[name], ranks
        assert (alone["ranks"], first["ranks"]) == (1, len(ranks))
        assert torch.equal(alone["groups"], first["groups"])
        assert alone["updates"] == first["updates"]
        assert len(alone["sources"]) == 2 * (name == "two sources")
        # what the start's weights draw is the same in every bit; gradients are summed in another order
        assert torch.equal(alone["rewards"][0], first["rewards"][0]), name
        assert torch.equal(alone["images"][0], first["images"][0]), name
        assert_same(name, alone, first, 1e-5)
        for other in others:
            assert_same(name, first, other, 0)


def test_two_ranks_do_the_same_work(two_blocks, tmp_path):
    train_alone(two_blocks, tmp_path, *words(WHOLE, "alone"))
    run_ranks(SCRIPT, two_blocks, tmp_path, *words(WHOLE), world=2, logs=tmp_path)
    assert_same_work(results(tmp_path / "alone", 1, WHOLE), results(tmp_path, 2, WHOLE))


@pytest.mark.slow
def test_two_ranks_that_train_on_the_rollouts_passes_do_the_work_of_later_ones(two_blocks, tmp_path):
    train_alone(two_blocks, tmp_path, *words({"Flow-GRPO, cps": TWO}))
    run_ranks(
        SCRIPT, two_blocks, tmp_path, *words({"Flow-GRPO, reused": f"{TWO},micro_batch_size=8"}), world=2, logs=tmp_path
    )
    (alone,) = results(tmp_path, 1, ["Flow-GRPO, cps"])["Flow-GRPO, cps"]
    first, other = results(tmp_path, 2, ["Flow-GRPO, reused"])["Flow-GRPO, reused"]
    assert_same("reused", alone, first, 1e-5)
    assert_same("reused", first, other, 0)


@pytest.fixture(scope="module")
def place(two_blocks, tmp_path_factory):
    """The folder of all other runs, by kind: those on one rank run here, those on two in a single launch."""
    place, whole = tmp_path_factory.mktemp("whole"), {**OTHERS, **CONTINUED}
    train_alone(two_blocks, place, *words(whole, "1"), *words(CUT, "1 cut"))
    for strategy, jobs in SHARDED.items():
        train_alone(two_blocks, place, *words(jobs, f"1 for {strategy}"))
    continue_from(place, 1, 2)
    broken = dict.fromkeys(["skip", "stop", "outage"], "iterations=4")
    jobs = [*words({**whole, **broken}, "2"), *words(CUT, "2 cut"), *words(CONTINUED, "1 then 2")]
    jobs += [job for strategy, of in SHARDED.items() for job in words(of, strategy, strategy)]
    run_ranks(SCRIPT, two_blocks, place, *jobs, world=2, logs=place, timeout_s=800)
    continue_from(place, 2, 1)
    train_alone(two_blocks, place, *words(CONTINUED, "2 then 1"))
    return place


def continue_from(place, before, after):
    (folder := place / f"{before} then {after}").mkdir()
    for name in CONTINUED:
        shutil.copy(place / str(before) / f"{name}.middle.ckpt", folder / f"{name}.ckpt")


@pytest.mark.slow
@pytest.mark.timeout(900)  # all runs
def test_other_methods_do_the_same_work(place):
    for suffix, jobs in (("", {**OTHERS, **CONTINUED}), (" cut", CUT)):
        assert_same_work(results(place / f"1{suffix}", 1, jobs), results(place / f"2{suffix}", 2, jobs))


@pytest.mark.slow
def test_the_middle_of_an_iteration_goes_on_with_another_number_of_ranks(place):
    whole = results(place / "1", 1, CONTINUED)
    for before, after in [(2, 1), (1, 2)]:
        for name, (rest, *_) in results(place / f"{before} then {after}", after, CONTINUED).items():
            alone = whole[name][0]
            assert (rest["ranks"], rest["updates"], len(rest["rewards"])) == (after, 4, 1)
            assert rest["row"] == pytest.approx(alone["row"], rel=1e-3, abs=1e-5), name
            assert_same(name, {**alone, "rewards": alone["rewards"][1:], "images": alone["images"][2:]}, rest, 1e-5)


@pytest.mark.slow
def test_a_loss_that_is_no_number_on_one_rank_stops_or_skips_on_all(place):
    found = results(place / "2", 2, ["skip", "stop"])
    for rank in found["skip"]:
        assert (rank["updates"], rank["skipped"], rank["error"]) == (3, 1, "")
    assert_same("skip", *found["skip"], 0)
    for rank in found["stop"]:
        assert rank["updates"] == 2
        assert rank["error"].startswith("The loss is not finite on rank 1 of 2, in update 1 of iteration 3.")
    assert_same("stop", *found["stop"], 0)
    assert all(value.isfinite().all() for value in found["skip"][0]["weights"].values())


@pytest.mark.slow
def test_ranks_save_together_if_a_reward_fails_on_all_images(place):
    for rank in results(place / "2", 2, ["outage"])["outage"]:
        assert rank["error"].startswith("16 of 16 images of iteration 3 failed, so there is nothing to learn.")
    saved = torch.load(place / "2" / "checkpoints" / "interrupted.ckpt", weights_only=True)
    assert saved["epoch"] == 2


@pytest.mark.slow
def test_methods_with_copies_of_their_own_do_the_same_work_on_sharded_weights(place):
    for strategy, jobs in SHARDED.items():
        alone = results(place / f"1 for {strategy}", 1, jobs)
        for name, (first, _) in results(place / strategy, 2, jobs).items():
            one = alone[name][0]
            assert (first["ranks"], first["updates"]) == (2, one["updates"])
            assert len(first["sources"]) == 2 * (name == "OPD")
            assert_same(f"{name}, {strategy}", one, first, 1e-5)
