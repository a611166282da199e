"""``lightning check --scale``: sizes, bytes and seconds on many GPUs."""

import pytest
from commands import check
from helpers import repeating
from real_architectures import FLUX_DEV, SD35_MEDIUM, write_architecture

from lit_vgrpo.apps.scale.arithmetic import Calls, Cost, Exchange, Outlook, exchanges, fitting
from lit_vgrpo.core.sizes import Sizes

WEIGHTS = [(10, 4, False), (3, 100, True)]
"""Rows, bytes of a row and whether it is trained: 40 bytes frozen and 300 trained."""
CALLS = Calls(sampling=5, without_grad=2, with_grad=4)
PLAN = Sizes(16, 4, updates_per_iteration=2, micro_batch_size=2).plan(16)


def totals(strategy, gpus=16, **options):
    found = exchanges(strategy, WEIGHTS, CALLS, PLAN, gpus, **options)
    return [(one.kind, one.size, one.ranks, one.times) for one in found[1:]]


def test_what_each_strategy_exchanges():
    """Two micro-batches in each of two updates; FSDP2 pads 10 and 3 rows to 16."""
    assert totals("ddp") == [("all_reduce", 300, 16, 2)]
    assert totals("zero1") == [("all_reduce", 300, 16, 2), ("gather", 300, 16, 2)]
    assert totals("zero2") == [("all_reduce", 300, 16, 4), ("gather", 300, 16, 2)]
    assert totals("zero3") == [("gather", 340, 16, 5), ("gather", 340, 16, 10), ("scatter", 300, 16, 4)]
    assert totals("fsdp2") == [("gather", 1664, 16, 5), ("gather", 1664, 16, 10), ("scatter", 1600, 16, 4)]
    hsdp = [("gather", 448, 4, 5), ("gather", 448, 4, 10), ("scatter", 400, 4, 4), ("all_reduce", 100, 4, 4)]
    assert totals("fsdp2", shard_size=4) == hsdp


def test_seconds_of_an_exchange_are_those_of_the_slower_link():
    within = Exchange("all_reduce", 800, 8, 3, True, crosses=False)
    assert within.sent == 2 * 800 * 7 / 8 * 3
    assert within.seconds(100, 1) == within.sent / 100
    across = Exchange("gather", 800, 16, 1, True, crosses=True, rings=8)
    assert across.seconds(100, 50) == 8 * across.sent / 50


def test_where_the_time_goes():
    """A rank has 4 images and samples 6, in batches of 3; the reward scores 64 images while one batch is sampled."""
    found = Outlook(PLAN, 6, 3, exchanges("ddp", WEIGHTS, CALLS, PLAN, 16))
    timed = found.timed(Cost(1.0, 0.5, 0.25, 0.1), 100, 50, reward_rate=8)
    exchange = 2 * 2 * 300 * 15 / 16 / 50
    assert timed.seconds == pytest.approx(
        {"images": 7, "padding": 2, "exchange": exchange, "reward": 64 / 8 - 3 - 1, "other": 0.1}
    )
    assert timed.share == pytest.approx(7 / (timed.total - 2))


@pytest.mark.parametrize(
    ("sizes", "ranks", "prompts", "micro"),
    [
        (Sizes(48, 24), 8, 48, 8),
        (Sizes(48, 24), 64, 64, 8),
        (Sizes(48, 24), 512, 64, 8),  # 3 images on a rank, all in one micro-batch
        (Sizes(48, 24, micro_batch_size=5), 48, 48, 4),
        (Sizes(32, 12, updates_per_iteration=4, split_updates=True, micro_batch_size=2), 64, 256, 2),
        (Sizes(6, 4, micro_batch_size="auto"), 4, 8, 8),
    ],
)
def test_the_nearest_sizes_that_divide(sizes, ranks, prompts, micro):
    found = fitting(sizes, ranks)
    assert (found.prompts_per_iteration, found.micro_batch_size) == (prompts, micro)
    assert not found.errors(ranks)


def test_what_divides_no_number_of_gpus(tiny_recipe, capsys):
    words = ["trainer.strategy={class_path: FSDP2, init_args: {shard_size: 2}}", "trainer.devices=2"]
    assert check([str(tiny_recipe), *words, "--scale", "1,2,4"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[2].split() == ["1", "-", "-", "-"]
    assert "1 GPUs: trainer.strategy.shard_size=2 does not divide 1." in out
    assert [line.split()[1] for line in out[3:5]] == ["2", "1"]


def test_a_recipe_without_measured_seconds(tiny_recipe, capsys):
    words = ["data.prompts_per_iteration=6", "data.split_updates=true", "data.updates_per_iteration=6"]
    assert check([str(tiny_recipe), *words, "trainer.strategy=zero1", "--scale", "1,2,4"]) == 0
    out = capsys.readouterr().out
    assert "2 GPUs: updates_per_iteration=6 cannot divide the images equally on 2 ranks. Set " in out
    assert (
        "Set data.prompts_per_iteration=12 model.rollout_batch_size=6, or data.updates_per_iteration=3, or use 1 GPUs"
        in out
    )
    assert "No seconds: " in out
    assert "--seconds-per-image SAMPLING,TRAINING" in out
    assert "Waiting for jpeg is not included: give --reward-rate" in out
    timed = ["--scale", "1,2", "--seconds-per-image", "2,1", "--reward-rate", "0.5", "--bandwidth", "1,1"]
    assert check([str(tiny_recipe), *timed]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:4]]
    # Sampled in one batch of 4, which hides nothing: 4 / 0.5 s of waiting, and on two GPUs 2 images of padding.
    assert rows[0][1:] == ["4", "0", "B", "0", "B", "20.0", "0.2", "60%", "0%", "0%", "40%", "0%"]
    assert (rows[1][1], *rows[1][6:]) == ("2", "18.0", "0.2", "33%", "22%", "0%", "44%", "0%")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--scale", "0"], "--scale 0 is not a list of positive whole numbers. Write it as --scale 1,8,64,512."),
        (["--scale", "1", "--bandwidth", "3"], "--bandwidth 3 is not 2 positive numbers. Write it as --bandwidth 3"),
        (
            ["--scale", "1", "model.policy.checkpoint=a/b"],
            "--scale needs the shapes of the weights: small files of a/b are",
        ),
    ],
)
def test_what_it_refuses(tiny_recipe, capsys, words, line):
    assert check([str(tiny_recipe), *words]) == 2
    assert capsys.readouterr().err.startswith(line)


REAL = [("sd3_pickscore", SD35_MEDIUM), ("flux_multireward", FLUX_DEV)]


@pytest.mark.parametrize(("recipe", "sizes"), repeating(REAL, slow=REAL[1:]))
def test_real_sizes(recipe, sizes, sd3_folder, flux_folder, tmp_path, capsys):
    """The iteration that took 16.0 s on an H100, and all weights of FLUX, in float32, for each of 130 calls."""
    small = sd3_folder(t5=True) if recipe == "sd3_pickscore" else flux_folder()
    folder = write_architecture(tmp_path / "real", small, sizes)
    words = ["trainer.strategy=fsdp2", "--scale", "8"]
    if recipe == "sd3_pickscore":
        words = ["data.prompts_per_iteration=1", "--scale", "1"]
    assert check([recipe, f"model.policy.checkpoint={folder}", *words]) == 0
    out = capsys.readouterr().out
    row = out.splitlines()[2].split()
    if recipe == "sd3_pickscore":
        assert row[6] == "16.0"
        assert "trains 75.1 MB of a network of 4.6 GB" in out
    else:
        gathers, scatters = 64 + 18 + 2 * 24, 24
        assert float(row[4]) == pytest.approx((gathers + scatters) * 11_901_408_320 * 4 * 7 / 8 / 1e9, rel=1e-3)
