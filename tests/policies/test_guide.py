"""The example of docs/add_a_policy.md and verify_a_policy.md, built from its text: a family that the package lacks."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from commands import check, run

from lit_vgrpo.policies import verify
from lit_vgrpo.policies.checks import Broken, checks_of

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = "".join((DOCS / f"{name}_a_policy.md").read_text() for name in ("add", "verify"))
OPTIONS = {"max_sequence_length": 48, "height": 32, "width": 48}
CODE, SMALL = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)


def small_folder(folder, code=SMALL):
    """Run the guide's script that writes a small random pipeline."""
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        patch.setattr(sys, "argv", ["small_lumina2.py", str(folder)])
        torch.manual_seed(0)
        exec(code, {"__name__": "__main__"})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_folder(tmp_path_factory.mktemp("lumina2"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the guide's file, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_models.py").write_text(CODE)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command puts the folder there
    yield tmp_path
    sys.modules.pop("my_models", None)
    importlib.invalidate_caches()


def policy_class(code):
    names = {"__name__": "guide"}
    exec(code, names)
    return names["Lumina2Policy"]


@pytest.mark.slow
def test_the_command_finds_nothing_wrong(here, folder, capsys):
    words = [f"{name}={value}" for name, value in OPTIONS.items()]
    assert verify.main(["my_models.Lumina2Policy", f"checkpoint={folder}", *words]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert all(line.startswith("ok  ") for line in lines)
    assert len(lines) == 13
    assert last == "Lumina2Policy samples and trains like Lumina2Pipeline."


SAME_PICTURE = "the pipeline samples the same image: "
UNSHIFTED = "type(self.pipeline.scheduler)(shift=1.0)"
UNSHIFTED_DPM = f"{UNSHIFTED} if solver == 'dpm++' else self.pipeline.scheduler"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "found"),
    [
        ("timestep=1 - t", "timestep=t", f"{SAME_PICTURE}euler, guidance 1"),
        ("return -prediction", "return prediction", f"{SAME_PICTURE}unipc, guidance 1"),
        ('"mask": mask}\n\n    def enc', '"mask": mask * 0 + 1}\n\n    def enc', f"{SAME_PICTURE}euler, guidance 1"),
        ("def encode_negative", "def _encode_negative", f"{SAME_PICTURE}euler, guidance 3"),
        ('pipeline_options = {"cfg', 'unused = {"cfg', f"{SAME_PICTURE}dpm++, guidance 3"),
        ('"flow"', '"flow"\n    uses_latent_shift = False', f"{SAME_PICTURE}euler, guidance 1"),
        ("return (scheduler.timesteps", "return 1000 * (scheduler.timesteps", "times are in (0, 1] and decrease"),
        ("timestep=1 - t", "timestep=t * 0", "noise, time and prompt reach the prediction"),
        ("self.pipeline.scheduler, steps", f"{UNSHIFTED}, steps", f"{SAME_PICTURE}euler, guidance 1"),
        ("self.pipeline.scheduler, steps", f"{UNSHIFTED_DPM}, steps", "times are in (0, 1] and decrease"),
    ],
    ids=["time", "sign", "mask", "negative", "guidance", "shift", "units", "dropped", "times", "times of one solver"],
)
def test_a_mistake_is_found(folder, right, wrong, found):
    assert right in CODE
    policy = policy_class(CODE.replace(right, wrong))(str(folder), lora_rank=2, **OPTIONS).load()
    with pytest.raises(Broken):
        dict(checks_of(policy))[found](policy)


QUIET = """
for name, weight in transformer.named_parameters():
    if name.startswith("layers.") and name.endswith("norm2.weight"):
        weight.data.mul_(1e-5)
"""
"""Lets the pictures hardly hear of the prompts: they reach them through attention, whose output this scales."""


def test_a_folder_whose_prompts_hardly_show_is_refused(tmp_path):
    """Where the mistakes that it hides pass for the same picture."""
    folder = small_folder(tmp_path, SMALL.replace("scheduler = ", f"{QUIET}\nscheduler = "))
    wrong = CODE.replace('"mask": mask}\n\n    def enc', '"mask": mask * 0 + 1}\n\n    def enc')
    wrong = wrong.replace("def encode_negative", "def _encode_negative")
    policy = policy_class(wrong)(str(folder), lora_rank=2, **OPTIONS).load()
    checks = dict(checks_of(policy))
    assert checks[f"{SAME_PICTURE}euler, guidance 1"](policy)
    assert checks[f"{SAME_PICTURE}euler, guidance 3"](policy)
    with pytest.raises(Broken, match=r"other prompts change the images by .*larger random ones where prompts enter"):
        checks["prompts change the images"](policy)


@pytest.mark.slow
def test_a_path_the_other_way_is_found(folder):
    """The pipeline's pictures cannot show it: rollouts would be right and the loss wrong."""
    turned = CODE.replace("return -prediction", "return prediction").replace(
        "return flow_scheduler(", "return turned(flow_scheduler("
    )
    turned = turned.replace("sigmas.tolist())", "sigmas.tolist()))") + (
        "\n\ndef turned(scheduler):\n"
        "    step = scheduler.step\n"
        "    scheduler.step = lambda v, *args, **options: step(-v, *args, **options)\n"
        "    return scheduler\n"
    )
    policy = policy_class(turned)(str(folder), **OPTIONS).load()
    with pytest.raises(Broken, match="build_path is the wrong path"):
        dict(checks_of(policy))["the path agrees with the solver's last step"](policy)


@pytest.mark.parametrize("trained", [{"lora_rank": 2}, {}], ids=["adapter", "full"])
def test_the_checks_leave_the_policy_as_it_was(folder, trained):
    policy = policy_class(CODE)(str(folder), **trained, **OPTIONS).load()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    for shown, measure in list(checks_of(policy))[-3:]:
        assert measure(policy), shown
    after = policy.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())


@pytest.mark.slow
def test_one_iteration_through_the_command(here, folder, capsys):
    (block,) = re.findall(r"```yaml\n(.*?)```", GUIDE, flags=re.DOTALL)
    recipe = yaml.safe_load(block)
    recipe["model"]["policy"]["init_args"] |= {**OPTIONS, "checkpoint": str(folder), "dtype": "float32"}
    recipe["model"]["reward"] = "JPEGCompressibility"
    recipe["trainer"] = {"max_epochs": 1, "accelerator": "cpu", "devices": 1}
    recipe["data"] = {
        "train": "shipped:prompts/shapes_train.jsonl",
        "heldout": "shipped:prompts/shapes_heldout.jsonl",
        **{"heldout_limit": 1, "prompts_per_iteration": 1, "group_size": 2, "micro_batch_size": 2},
    }
    Path("mine.yaml").write_text(yaml.safe_dump(recipe))
    assert check(["mine.yaml"]) == 0
    assert "memory: not estimated" in capsys.readouterr().out
    assert run(["mine.yaml", "model.objective.rollout.steps=2", "model.objective.num_mc_samples=2", "run_dir=out"]) == 0
    assert yaml.safe_load(Path("out/config.yaml").read_text())["model"]["policy"]["class_path"].startswith("my_models.")
    assert Path("out/checkpoints/last.ckpt").is_file()
