"""``lightning check``: every error, no training, nothing written."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import check, run
from helpers import repeating
from safetensors.torch import load_file, save_file

from lit_vgrpo.cli.check import checkpoint_bytes, disk_errors
from lit_vgrpo.launch.build import build


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_a_good_recipe(tiny_recipe, capsys):
    needs_logger = "trainer.callbacks=[lightning.pytorch.callbacks.DeviceStatsMonitor]"
    assert check([str(tiny_recipe), needs_logger]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "images" in out
    assert "no errors found for 1 process." in out
    assert sorted(path.name for path in tiny_recipe.parent.iterdir()) == ["tiny.yaml"]


def test_a_warning_is_given_once(tiny_recipe, capsys):
    with pytest.warns(UserWarning, match="No prompts are held out"):
        assert check([str(tiny_recipe), "data.heldout=null"]) == 0
    assert "No prompts are held out" not in capsys.readouterr().out


def test_bad_keys_values_files_and_checkpoints_in_one_call(tiny_recipe, capsys):
    overrides = ["trainer.max_epoch=3", "data.group_size=1", "data.train=none.txt", "model.policy.checkpoint=/none"]
    assert check([str(tiny_recipe), *overrides, "model.objective.clp=.1"]) == 2
    found = "\n".join(lines(capsys))
    assert "trainer.max_epoch is not an option of Trainer. Did you mean max_epochs?" in found
    assert "model.objective.clp is not an option of VGRPO. Did you mean clip?" in found
    assert "data.group_size=1: Use 2 or more" in found
    assert "none.txt does not exist" in found
    assert "/none is not a folder. Set model.policy.checkpoint" in found


def test_a_trainer_that_cannot_be_built_hides_no_error_of_the_model(tiny_recipe, capsys):
    assert check([str(tiny_recipe), "trainer.devices=0", "model.evaluation.solver=cps"]) == 2
    found = "\n".join(lines(capsys))
    assert "Trainer(devices=0)" in found
    assert "model.evaluation.solver=cps is not an ODE solver of SD3Policy" in found


SNR = "trainer.callbacks=[{class_path: SurrogateDiagnostics, init_args: {snr_every_n_iterations: 1}}]"
HTTP = "model.reward={class_path: HTTPReward, init_args: {url: '%s'}}"
OPTIMIZER = "model.optimizer={class_path: torch.optim.%s}"
PLATEAU = "model.lr_scheduler={class_path: torch.optim.lr_scheduler.ReduceLROnPlateau}"
WATCHED = "model.lr_scheduler={class_path: lightning.pytorch.cli.ReduceLROnPlateau, init_args: {monitor: foo}}"
ROLLOUT, FOLDER = "model.objective.rollout", "model.policy.checkpoint=faulty"
MISTAKES = [
    ([HTTP % "ftp://x/y"], "model.reward.url=ftp://x/y is no address of a server. Write http://HOST:PORT, with a port"),
    ([HTTP % "http://x:99999"], "model.reward.url=http://x:99999 is no address of a server."),
    ([OPTIMIZER % "SparseAdam"], "model.optimizer=SparseAdam cannot take a step: SparseAdam does not support dense gr"),
    ([OPTIMIZER % "LBFGS"], "model.optimizer=LBFGS cannot take a step: it needs the loss several times. Use Adam"),
    ([OPTIMIZER % "Muon"], "model.optimizer cannot be built: Muon only supports 2D parameters whereas we found a para"),
    (["model.optimizer=1e-4"], "model.optimizer=0.0001 names no class. Did you mean model.optimizer.lr=0.0001?"),
    ([WATCHED], "model.lr_scheduler.monitor=foo: runs log no metric with this name. Use one of: "),
    ([PLATEAU], "model.lr_scheduler=ReduceLROnPlateau watches no metric. Write {cl"),
    ([f"{ROLLOUT}.noise_level=0.7"], f"{ROLLOUT}.noise_level=0.7 has no effect with solver=None. Set noise_level="),
    ([FOLDER, "tensor"], "Cannot load HERE/faulty/transformer: 1 weight missing, such as context_embedder.bias."),
    ([FOLDER, "tokenizer.json"], f"{FOLDER} has a tokenizer that has 2 tokens, but its encoder 566. Save or "),
    ([FOLDER, "vae"], f"{FOLDER} has no vae, but SD3Policy needs it. In its model_index.json, it is null or absent."),
    ([f"{FOLDER}/vae/config.json"], f"{FOLDER}/vae/config.json is a file, not a pipeline folder. Use a folder with"),
    ([FOLDER, "model.policy.variant=fp16"], f"{FOLDER} has no weights of model.policy.variant=fp16. Leave it out."),
    (["model.policy.attention_backend=nope"], "model.policy.attention_backend=nope does not exist. Use one of: "),
    (["trainer.gradient_clip_val=2"], "trainer.gradient_clip_val is now an option of the model. Replace it by model."),
    (["trainer.accumulate_grad_batches=8"], "trainer.accumulate_grad_batches=8 is set by the sizes. Leave it out;"),
    (["trainer.limit_train_batches=0.5"], "trainer.limit_train_batches=0.5 is less than an iteration."),
    (["trainer.limit_val_batches=0.01"], "You requested to check 0.01 of the `val_dataloader`"),
    (["trainer.val_check_interval=100"], "`val_check_interval` (100) must be less than or equal to the number of"),
    (["trainer.callbacks=[BackboneFinetuning]"], "trainer.callbacks: BackboneFinetuning does not work with iterations"),
    (["trainer.callbacks=[mine.Refuses]"], "mine.py:6: RuntimeError: refused in setup."),
    ([SNR, "trainer.strategy=zero2"], "SurrogateDiagnostics.snr_every_n_iterations=1 does not work with trainer.strat"),
    (["run_dir=tiny.yaml/x"], "Cannot create the run folder tiny.yaml/x: "),
    (["trainer.max_epochs=0"], "trainer.max_epochs=0 is invalid. Use 1 or more, or -1."),
    (["model.evaluation.height=33"], "model.evaluation.height=33 is not a multiple of 8"),
    (["model.policy.checkpoint=."], ". has no model_index.json. Set model.policy.checkpoint to a folder that has it"),
]
REFUSES = """import lightning as L


class Refuses(L.Callback):
    def setup(self, trainer, pl_module, stage):
        raise RuntimeError("refused in setup")
"""


def take_away(what):
    """Remove a part of the pipeline folder ``faulty``."""
    weights = "faulty/transformer/diffusion_pytorch_model.safetensors"
    if what == "tensor":
        save_file(dict(sorted(load_file(weights).items())[1:]), weights, metadata={"format": "pt"})
    elif what == "vae":
        index = Path("faulty/model_index.json")
        index.write_text(json.dumps({**json.loads(index.read_text()), what: [None, None]}))
    else:
        Path("faulty/tokenizer", what).unlink()


@pytest.mark.parametrize(("words", "line"), MISTAKES)
def test_check_refuses_what_run_refuses(tiny_recipe, tiny_sd3, capsys, monkeypatch, words, line):
    if words[0].startswith(FOLDER):
        shutil.copytree(tiny_sd3, "faulty")
    words, taken = [word for word in words if "=" in word], [word for word in words if "=" not in word]
    for what in taken:
        take_away(what)
    monkeypatch.setattr("lit_vgrpo.training.evaluation.Evaluator.generate", None)  # before the first image
    (tiny_recipe.parent / "mine.py").write_text(REFUSES)
    for command in (check, run):
        assert command([str(tiny_recipe), *words]) == 2
        out, err = capsys.readouterr()
        assert err.splitlines()[0].replace(str(tiny_recipe.parent), "HERE").startswith(line)
        assert out == "" or command == run
    assert not [*tiny_recipe.parent.glob("runs/*/checkpoints")]


def test_a_gpu_that_this_machine_lacks(tiny_recipe, capsys):
    words = [str(tiny_recipe), "trainer.accelerator=gpu", "trainer.precision=16-mixed", "model.policy.dtype=float16"]
    assert check([*words, "trainer.devices=2"]) == 0
    out = capsys.readouterr().out
    assert "This machine has no GPU. Its parts, compared with a GPU: --memory 80GiB." in out
    assert "no errors found for 2 processes." in out
    assert check([*words, "--memory", "1.0001"]) == 2
    assert "0.1 MiB is available (the given GPU)" in capsys.readouterr().err
    assert check([*words, "--memory", "1GiB"]) == 2
    assert "1GiB leaves nothing: 1.00 GiB is reserved for CUDA. Give more." in capsys.readouterr().err
    assert run(words) == 2
    assert capsys.readouterr().err.startswith("trainer.accelerator=gpu: torch ")


PROCESSES = (
    "The launcher starts {} processes, but trainer.devices times trainer.num_nodes is {}: each would train a run"
)
TASK = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NAME": "train"}
SLURM = {**TASK, "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
LAUNCHED = [
    ({"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2"}, 1, PROCESSES.format(2, 1)),
    ({**SLURM, "SLURM_STEP_ID": "0"}, 1, PROCESSES.format(2, 1)),
    (SLURM, 2, "SLURM's job has 2 tasks, but this process was not started by srun"),
    ({**TASK, "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}, 2, PROCESSES.format(1, 2)),
]


@pytest.mark.parametrize(("launcher", "devices", "line"), repeating(LAUNCHED, slow=LAUNCHED[1:]))
def test_a_launcher_whose_processes_would_not_be_one_run(tiny_recipe, capsys, monkeypatch, launcher, devices, line):
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    words = [str(tiny_recipe), f"trainer.devices={devices}"]
    assert check(words) == 2
    assert line in "".join(lines(capsys))
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")  # a shell in an allocation starts its processes itself
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert check(words) == 0


@pytest.mark.slow
def test_weights_of_a_reward_that_cannot_be_had(tiny_recipe, capsys):
    assert check([str(tiny_recipe), "model.reward=PickScore", "model.reward.checkpoint=/none"]) == 2
    assert "/none" in lines(capsys)[0]


@pytest.mark.slow
def test_a_reward_that_always_fails(tiny_recipe, capsys):
    (tiny_recipe.parent / "fails.py").write_text("def divide(images, prompts):\n    return [1 / 0 for _ in prompts]\n")
    assert check([str(tiny_recipe), "model.reward={python: 'fails:divide', name: mine}"]) == 2
    assert lines(capsys) == ['Reward "mine" failed on random images: fails.py:2: ZeroDivisionError: division by zero.']


def test_too_little_disk_and_a_run_dir_that_cannot_be_written(tiny_recipe, monkeypatch):
    cli = build([str(tiny_recipe), "run_dir=there"], make_folder=False)
    assert disk_errors(cli) == []
    own = f"trainer.logger={{class_path: CSVLogger, init_args: {{save_dir: {tiny_recipe}/x}}}}"
    (error,) = disk_errors(build([str(tiny_recipe), own], make_folder=False))
    assert error == f"trainer.logger=CSVLogger cannot write to {tiny_recipe}/x, which is in a file. Set its save_dir."
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2**20))
    assert "0.0 GiB free" in disk_errors(cli)[0]
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert disk_errors(cli)[0].startswith("Cannot create the run folder there: ")


def test_a_checkpoint_is_as_large_as_the_weights_that_are_read(tiny_recipe, tiny_sd3, tmp_path, monkeypatch):
    monkeypatch.setattr("lit_vgrpo.cli.check.SMALLEST_NEED", 0)
    folder = tmp_path / "both"
    shutil.copytree(tiny_sd3, folder)
    weights = folder / "transformer/diffusion_pytorch_model.safetensors"
    for name in ("diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.bin", "other.safetensors"):
        (weights.parent / name).write_bytes(b"x" * 1000)

    def needed(*words):
        return checkpoint_bytes(build([str(tiny_recipe), f"model.policy.checkpoint={folder}", *words], False))

    assert needed() == 4 * weights.stat().st_size
    assert needed("model.policy.variant=fp16") == 4 * 1000


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_the_plan_is_that_of_the_world_size(tiny_recipe, capsys, devices):
    status = check([str(tiny_recipe), f"trainer.devices={devices}", "trainer.strategy=ddp"])
    out, err = capsys.readouterr()
    assert (status == 0) == (devices == 2)
    assert ("ranks                     2" in out) == (devices == 2)
    assert ("4 ranks" in err) == (devices == 4)


def test_prompts_that_a_reward_truncates_are_named_once(tiny_recipe, tiny_clip, capsys):
    Path("long.txt").write_text(f"a red circle\n{'very ' * 99}long\n")
    reward = f"model.reward={{class_path: PickScore, init_args: {{checkpoint: '{tiny_clip}'}}}}"
    assert check([str(tiny_recipe), reward, "data.train=long.txt", "data.prompts_per_iteration=4"]) == 0
    out = capsys.readouterr().out
    assert out.count("prompts are longer than the ") == 1
    assert "An iteration repeats prompts: it has 4 (data.prompts_per_iteration), the files 2." in out
    assert re.search(r'^Reward "pickscore": 1 of \d+ prompts are longer than the \d+ tokens that it reads', out, re.M)


PER_PAIR = """
from dataclasses import dataclass

from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives.pairs import PairObjective


@dataclass(eq=False)
class PerPair(PairObjective):
    default_rollout = RolloutSpec(steps=2)
    num_times: int = 2

    def losses(self, now, kept, micro):
        return now.error.square().flatten(2).mean(2), {}
"""


def test_an_own_method_whose_loss_is_per_pair(tiny_recipe, capsys, monkeypatch):
    monkeypatch.chdir(tiny_recipe.parent)
    Path("per_pair.py").write_text(PER_PAIR)
    assert check([str(tiny_recipe), "model.objective=per_pair.PerPair"]) == 2
    assert re.match(r"PerPair.losses returned losses of shape \((\d), 2\) for \1 images. Return one ", lines(capsys)[0])


def test_repositories_that_are_not_here_are_a_command_each(here, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("lit_vgrpo.system.hub.cached_file", lambda *place: None)
    monkeypatch.setattr("lit_vgrpo.apps.memory.estimate.advice", lambda *given: "Use less.")  # an estimate for each
    assert check(["flux_multireward", "--memory=48GiB"]) == 2
    too_large, why, *commands = capsys.readouterr().err.splitlines()
    assert too_large.startswith("The recipe needs about ")
    assert why.startswith("Cannot load models: not in the local cache and HF_HUB_OFFLINE is set. Run these commands, ")
    assert commands[0].endswith("dev')\" # or set model.policy.checkpoint")
    assert commands[1] == "hf download xswu/HPSv2 # or set model.reward.rewards[0].checkpoint"
    assert sum(line.startswith("hf download openai/clip-vit-large-patch14 ") for line in commands) == 1
