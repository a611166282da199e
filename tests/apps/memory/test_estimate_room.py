"""The rewards' models in the estimate, and the GPU that it is compared with."""

import re

import pytest
import torch
import zoo
from commands import check
from lightning.pytorch.strategies import SingleDeviceStrategy

from lit_vgrpo import OptimizerConfig, rewards
from lit_vgrpo.apps.memory import estimate as stages
from lit_vgrpo.apps.memory.estimate import estimate, memory_report, scorers
from lit_vgrpo.apps.memory.shares import bytes_of, shares, tensors_of
from lit_vgrpo.launch.build import build
from lit_vgrpo.policies import AutoPolicy, Flux2Policy, SD3Policy
from lit_vgrpo.policies.meta import policy_on_meta
from lit_vgrpo.rewards import Frames, HPSv2, JPEGCompressibility, PickScore, Reward, Weighted, as_weighted
from lit_vgrpo.training.sharded import ZeRO

pytestmark = pytest.mark.slow

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FSDP = ["trainer.strategy=fsdp2", "trainer.devices=2"]


class Own(Reward):
    name = "own"

    def __call__(self, images, prompts, rows):
        return images.mean(dim=(1, 2, 3))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rewards_model_is_as_large_as_when_it_is_loaded(tiny_clip, dtype):
    reward = PickScore(str(tiny_clip), dtype=dtype)
    found, unknown = scorers([reward], CPU)
    reward.load()
    assert unknown == []
    # Index buffers have no part in what is read off weights.
    assert found == pytest.approx(bytes_of(tensors_of(reward._model)), rel=0.005)


def test_published_checkpoints_that_are_not_here_are_known():
    """Two models of ViT-H, one of them in half precision: 986 million parameters each."""
    assert scorers([PickScore(), HPSv2(dtype="bfloat16")], GPU) == (6 * 986_109_441, [])
    assert scorers([PickScore(), PickScore(device="cuda:1"), HPSv2(device="cpu")], GPU) == (4 * 986_109_441, [])
    assert scorers([rewards.AestheticScore()], GPU) == (4 * (303_966_208 + 927_969), [])
    assert scorers([rewards.CLIPImageSimilarity()], GPU) == (4 * 427_616_513, [])
    # What is not known is named.
    function = rewards.PythonReward("builtins:len")
    given = [Own(), PickScore("some/other"), HPSv2(model="ViT-B-32"), rewards.ShapesReward(), function]
    assert scorers(given, GPU) == (0, ["own", "pickscore", "hpsv2", function.name])


def test_a_gpu_can_be_given(tiny_recipe, capsys):
    """Its reserve is kept back, and the recipe is estimated as on a GPU."""
    words = [str(tiny_recipe), "model.policy.offload_encoders=true"]
    assert check([*words, "--memory", "2GiB"]) == 0
    out = capsys.readouterr().out
    assert "Available: 1.00 GiB, the given GPU. It fits." in out
    assert "text encoders" not in out
    assert check([*words, "--memory=1GB"]) == 2
    assert "1GB leaves nothing: 1.00 GiB is reserved for CUDA. Give more." in capsys.readouterr().err
    assert "text encoders" in estimate(build(words, make_folder=False)).parts
    assert check(words) == 0
    out = capsys.readouterr().out
    assert "Its parts, compared with a GPU: --memory 80GiB." in out


def test_rewards_of_held_out_images_count(tiny_recipe, tiny_clip):
    words = [str(tiny_recipe), "model.untrained_reward=PickScore", f"model.untrained_reward.checkpoint={tiny_clip}"]
    cli = build(words, make_folder=False)
    found = estimate(cli)
    combined = as_weighted(Frames(Weighted([JPEGCompressibility(), PickScore(str(tiny_clip))])))
    assert found.parts["reward models"] == scorers(combined.leaves(), CPU)[0] > 0
    assert memory_report(cli)[1] == []


def test_what_a_setting_changes(tiny_recipe):
    """Each part or phase that a setting is for, on a GPU."""

    def of(*words):
        found = estimate(build([str(tiny_recipe), *words], make_folder=False), GPU)
        return {**found.parts, **found.phases}

    base = of()
    weights, encoders = base["trained weights"], base["text encoders"]
    assert base["copies of the trained weights"] == 0  # the reference stays in the CPU's memory
    assert base[stages.STEP] == weights
    assert base["VAE"] > 0
    # Settings of which no two change the same part or phase are estimated at once.
    devices = ["model.policy.offload_encoders=true", "trainer.callbacks=EMA", "model.rollout_device=cpu"]
    sizes = ["model.rollout_batch_size=1", "model.objective.num_mc_samples=4"]
    found = of(*devices, *sizes, "model.optimizer.kind=adamw8bit")
    assert found["text encoders"] == 0
    assert found[stages.ENCODING] == base[stages.ENCODING] + encoders
    assert found["copies of the trained weights"] == weights
    assert found["stored latents"] == 0
    assert found["AdamW's moments"] < 0.6 * base["AdamW's moments"]
    assert found[stages.STEP] == 0
    assert found[stages.ROLLOUT] < base[stages.ROLLOUT] / 2
    assert found[stages.TRAINING] > 1.5 * base[stages.TRAINING]
    found = of("model.objective.rollout.guidance=2", "model.policy.decode_batch_size=1")
    assert found[stages.ROLLOUT] > 1.5 * base[stages.ROLLOUT]
    assert found[stages.DECODING] < base[stages.DECODING]
    later, reused = (of("model.objective=FlowGRPO", f"model.objective.reuse_rollout={on}") for on in ("false", "true"))
    assert reused == {**later, stages.DECODING: later[stages.DECODING] + later[stages.TRAINING]}  # the graph is kept


@pytest.mark.parametrize(("trained", "leaves"), [("lora_rank=2", False), ("train_only=[transformer_blocks.*]", True)])
def test_a_waiting_network_makes_room_for_the_encoders(tiny_recipe, trained, leaves):
    """Nothing else changes, and under FSDP2 not even that: the network stays."""

    def of(*words):
        words = [f"model.policy.{word}" if "." not in word.partition("=")[0] else word for word in words]
        return estimate(build([str(tiny_recipe), *words], make_folder=False), GPU)

    apart = [trained, "offload_encoders=true"]
    one, other, sharded = of(*apart), of(*apart, "offload_network=true"), of(*apart, "offload_network=true", *FSDP)
    room = one.parts["frozen weights"] - one.phases[stages.ENCODING]
    assert (room < 0) == leaves
    assert other.phases == {**one.phases, stages.ENCODING: max(0, -room)}
    assert other.parts == one.parts
    assert sharded.phases[stages.ENCODING] == of(*apart, *FSDP).phases[stages.ENCODING]


SMALL = [f"{key}=1" for key in ("data.micro_batch_size", "data.eval_batch_size", "model.rollout_batch_size")]
SMALL += ["model.policy.decode_batch_size=1", "model.policy.gradient_checkpointing=true", "model.policy.lora_rank=2"]


def advised(cli, free):
    """The settings that a check of a GPU with so much room advises."""
    needed = estimate(cli, GPU)
    found = stages.advice(cli, needed, free, GPU, {})
    return re.fullmatch("Set (.*), which needs .*", found)[1].split() if found.startswith("Set") else found


def test_advice_makes_a_recipe_fit_and_none_of_it_is_to_spare(tiny_recipe):
    given = ["model.policy.lora_rank=2", "model.policy.offload_encoders=true"]

    def cli_of(*words):
        return build([str(tiny_recipe), *given, *words], make_folder=False)

    def peak(*words):
        return estimate(cli_of(*words), GPU).peak

    room = peak("model.policy.decode_batch_size=1", "data.micro_batch_size=1")
    settings = advised(cli_of(), room)
    assert {one.partition("=")[0] for one in settings}.isdisjoint(one.partition("=")[0] for one in given)
    assert peak(*settings) <= room
    for one in settings:
        assert peak(*(other for other in settings if other != one)) > room


def test_the_network_is_advised_to_wait_where_encoding_is_the_peak(tiny_recipe):
    """And what a recipe has set is not advised again."""
    words = [str(tiny_recipe), *SMALL, "model.policy.height=16", "model.policy.width=16"]
    apart, waits = "model.policy.offload_encoders=true", "model.policy.offload_network=true"
    cli = build([*words, apart], make_folder=False)
    needed = estimate(cli, GPU)
    assert needed.peak_phase == stages.ENCODING
    assert advised(cli, needed.peak - 1) == [waits]
    room = estimate(build([*words, apart, waits], make_folder=False), GPU).peak
    assert advised(build(words, make_folder=False), room) == [apart, waits]
    last = build([*words, apart, waits, "model.policy.quantisation=nf4"], make_folder=False)
    assert advised(last, 0) == "Use a larger GPU, or several: strategy/fsdp2."
    nearest = rf"With {waits} model.policy.quantisation=nf4, it needs [\d.]+ MiB. Use a larger GPU, or several: "
    assert re.match(nearest, advised(cli, 0))


OF_ZOO = ("LTXPipeline", "Lumina2Pipeline", "HunyuanImagePipeline", "LongCatImageEditPipeline")


@pytest.mark.parametrize("name", ["sd3", "flux2", *OF_ZOO])
def test_a_learned_policy_takes_what_its_family_does(name, sd3_folder, large_folder, tmp_path):
    """Or what it takes once it is loaded. Those of the zoo read statistics of a VAE, masks, or sizes of pictures."""
    if name in OF_ZOO:
        folder, entry = str(zoo.save(name, tmp_path)), zoo.ZOO[name]
        options = {**entry.size, "call": dict(entry.options), "references": int(entry.picture is not None)}
        learned, family = AutoPolicy(folder, **options), AutoPolicy(folder, **options).load()
    else:
        folder, length = str(sd3_folder(True) if name == "sd3" else large_folder(name)), {"max_sequence_length": 48}
        learned = AutoPolicy(folder, call=length, height=32, width=32)
        kind = SD3Policy if name == "sd3" else Flux2Policy
        family = policy_on_meta(kind(folder, **length, height=32, width=32))
    found, peaks = [], []
    for policy in (policy_on_meta(learned), family):
        parts = [policy.pipeline.vae, *policy.encoders()]
        on_meta = policy.device.type == family.device.type == "meta"
        peaks.append(stages.peak_of_pass(policy, stages.Pass(4, 1.0, True)) if on_meta else 0)
        held = shares(policy, OptimizerConfig(), SingleDeviceStrategy(), 1, True)
        found.append((held, [bytes_of(tensors_of(part)) for part in parts], torch.Size(policy.latent_shape).numel()))
    assert found[0] == found[1]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


def test_what_zero_offloads_leaves_the_gpu(tiny_sd3):
    policy = policy_on_meta(SD3Policy(str(tiny_sd3), lora_rank=4))
    second, third = (shares(policy, OptimizerConfig(), ZeRO(stage, offload=True), 4, True) for stage in (2, 3))
    for found in (second, third):
        assert found.step == found.parts["gradients"] == found.parts["AdamW's moments"] == 0
        assert found.parts["ZeRO's bucket"] == 4 * 50_000_000
    buffers = bytes_of(policy.network.buffers())
    assert second.parts["frozen weights"] > buffers == third.parts["frozen weights"]
    assert third.parts["trained weights"] == 0
