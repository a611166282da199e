"""A run that starts from an earlier run's weights: it holds exactly these, and says in one line why it cannot."""

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from commands import export, run
from helpers import make_module, same
from safetensors.torch import load_file
from saved_runs import folder_with, train

from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.policies import SD3Policy
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.training.checkpoint_file import read, write
from lit_vgrpo.training.folder import CONFIG_NAME
from lit_vgrpo.training.saved_weights import SavedWeights, load_policy, policy_errors, start_hashes

pytestmark = pytest.mark.slow

LAST = "runs/first/checkpoints/last.ckpt"
RECIPE = """
seed_everything: 7
trainer: {max_epochs: 1, accelerator: cpu, devices: 1, logger: false}
model:
  policy:
    class_path: SD3Policy
    init_args: {checkpoint: CHECKPOINT, max_sequence_length: 1, lora_rank: 2, lora_alpha: 4}
  objective: {class_path: FlowGRPO, init_args: {kl_weight: 10.0, rollout: {solver: flow_sde, steps: 2}}}
  reward: helpers.Brightness
  optimizer: {lr: 0.1}
data: {train: train.txt, prompts_per_iteration: 1, group_size: 2, micro_batch_size: 2}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_sd3):
    """A folder with a finished run, runs/first, that kept an average."""
    place = tmp_path_factory.mktemp("start")
    with folder_with(place, RECIPE, tiny_sd3, ["a red circle on the left"]):
        train("name=first", "trainer.callbacks+={class_path: EMA, init_args: {decay: 0.5}}")
    return place


@pytest.fixture
def inside(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


def policy(folder, **options):
    return SD3Policy(str(folder), **{"max_sequence_length": 1, "lora_rank": 2, "lora_alpha": 4, **options})


def saved(path, variant="trained"):
    return SavedWeights.read(Path(path)).tensors[variant]


STARTS = [*itertools.product(["runs/first", f"runs/first/{CONFIG_NAME}", LAST], ["trained", "EMA"])]


@pytest.mark.parametrize(("start_from", "variant"), STARTS)
def test_it_holds_the_weights_of_the_earlier_run(inside, tiny_sd3, start_from, variant):
    started = load_policy(policy(tiny_sd3, start_from=start_from, start_weights=variant.lower()))
    assert same(trainable_parameters(started), saved(LAST, variant))
    assert not same(trainable_parameters(started), trainable_parameters(policy(tiny_sd3).load()))


def test_a_policy_alone_does_not_start_from_other_weights_in_silence(tiny_sd3):
    with pytest.raises(RuntimeError, match=r"start_from=runs/first names a run.*load_policy\(policy\)"):
        policy(tiny_sd3, start_from="runs/first").load()


def test_the_reference_is_the_start(inside, tiny_sd3):
    options = {"lora_rank": 2, "lora_alpha": 4, "start_from": "runs/first"}
    module = make_module(tiny_sd3, policy_options=options)
    module.configure_model()
    assert same(module.reference.tensors, saved(LAST))


def test_a_run_that_started_so_goes_on_and_is_exported_whole(inside, capsys):
    words = ["tiny.yaml", "model.policy.start_from=runs/first"]
    assert run([*words, "name=whole", "trainer.max_epochs=2"]) == 0
    assert run([*words, "name=halves"]) == 0
    assert run(["runs/halves/config.yaml", "--resume", "trainer.max_epochs=2"]) == 0
    whole = saved("runs/whole/checkpoints/last.ckpt")
    # The KL term pulls towards the reference: were that another one after the break, so would these be.
    assert same(whole, saved("runs/halves/checkpoints/last.ckpt"))
    assert not same(whole, saved(LAST))
    Path("runs/first").rename("away")
    try:
        assert export(["runs/whole", "--to", "exported"]) == 0  # what was trained needs the start no more
        (line,) = policy_errors(policy("x", start_from="runs/first"))[1:]
        assert line.startswith("model.policy.start_from: runs/first is not a run. ")
    finally:
        Path("away").rename("runs/first")
    adapter = load_file("exported/pytorch_lora_weights.safetensors")
    found = {name.removeprefix("transformer."): tensor for name, tensor in adapter.items()}
    asked = {name.removeprefix("network.").replace(".default", ""): tensor for name, tensor in whole.items()}
    # the file's B matrices hold the scale, lora_alpha / lora_rank
    assert same(found, {name: 2 * tensor if "lora_B" in name else tensor for name, tensor in asked.items()})


def test_what_cannot_be_a_start_is_found_without_loading(inside, tiny_sd3, tmp_path):
    def error(start, weights="trained"):
        (line,) = policy_errors(policy(tiny_sd3, start_from=str(start), start_weights=weights)) or [None]
        return line

    assert error("runs/first", "ema") is None
    assert error("runs/frst") == "model.policy.start_from: runs/frst is not a run. Did you mean runs/first?"
    shutil.copy("runs/first/config.yaml", tmp_path)
    assert f"model.policy.start_from: {tmp_path} has no checkpoint yet." in error(tmp_path)
    (tmp_path / "torn.ckpt").write_bytes(Path(LAST).read_bytes()[:2000])
    assert "torn.ckpt is truncated or not a checkpoint." in error(tmp_path / "torn.ckpt")
    checkpoint = read(Path(LAST))
    checkpoint["callbacks"] = {}
    write(checkpoint, tmp_path / "plain.ckpt")
    assert error(tmp_path / "plain.ckpt", "ema") == (
        f"model.policy.start_weights=ema, but {tmp_path / 'plain.ckpt'} has no averaged weights: the run had no EMA "
        "callback. Set start_weights=trained."
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora_rank": 3, "lora_alpha": 4}, "lora_A.default.weight."),
        ({"lora_rank": None, "lora_alpha": None}, "trained tensors would not fit, such as "),
        ({"lora_alpha": 8}, "trained with lora_alpha=4, but the policy has 8, which would scale the adapter by 2."),
    ],
)
def test_other_trained_weights_are_refused(inside, tiny_sd3, options, words):
    with pytest.raises(LoadError) as caught:
        load_policy(policy(tiny_sd3, start_from="runs/first", **options))
    assert str(caught.value).startswith("model.policy.start_from=runs/first trained ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_its_fingerprint_is_that_of_the_weights(inside, tmp_path, tiny_sd3):
    shutil.copy(LAST, tmp_path / "moved.ckpt")
    first = start_hashes(policy(tiny_sd3, start_from=LAST))
    assert start_hashes(policy(tiny_sd3, start_from=str(tmp_path / "moved.ckpt"))) == first
    content = torch.load(LAST, weights_only=True)
    content["state_dict"][min(content["state_dict"])].view(-1)[0] += 1
    write(content, tmp_path / "moved.ckpt")
    assert start_hashes(policy(tiny_sd3, start_from=str(tmp_path / "moved.ckpt"))) != first
