"""Errors of a recipe name the key to type."""

import pytest

from lit_vgrpo.errors import UserError
from lit_vgrpo.launch.build import build

SEVERAL = "model.reward={class_path: Weighted, init_args: {rewards: [JPEGCompressibility, ShapesReward]}}"
STEPS = "model.lr_scheduler=torch.optim.lr_scheduler.StepLR"
ADAM = "{class_path: torch.optim.AdamW}"
CYCLE = "model.lr_scheduler={class_path: torch.optim.lr_scheduler.OneCycleLR, init_args: {max_lr: 0.1}}"
FLOATS = "Use 'float32', 'bfloat16' or 'float16'."
LINES = [
    ("model.objective.num_mc_sample=3", "model.objective.num_mc_sample is not an option of VGRPO. Did you mean num"),
    ("model.objective.rollout.stepz=3", "model.objective.rollout.stepz is not an option of RolloutSpec. Did you"),
    (
        "model.policy.skip_guidance_layers=[7]",
        "model.policy.skip_guidance_layers is not an option of SD3Policy. For an argument of the pipeline's call, set "
        "model.policy.call.skip_guidance_layers of AutoPolicy.",
    ),
    ("model.policy.device=cuda", "model.policy.device is not an option of SD3Policy. The device is the trainer's: tra"),
    ("model.polcy=3", "model.polcy is not an option of VGRPOModule. Did you mean policy?"),
    ("modl.x=3", "modl is not an option of a recipe. Did you mean model?"),
    ("model.objective=VGRP", "model.objective=VGRP is not a known class. Did you mean VGRPO?"),
    ("model.policy=StableDiffusionXL", "model.policy=StableDiffusionXL is not a known class. Did you mean SDXLPolicy?"),
    ("model.policy=FluxPipeline", "model.policy=FluxPipeline is not a known class. Did you mean FluxPolicy?"),
    ("model.objective.times=grid", "model.objective.times=grid: Use 'sampler' or 'uniform', or a mapping."),
    (
        "model.policy.dtype=float6",
        f"model.policy.dtype=float6: {FLOATS} Did you mean float16?",
    ),
    ("model.reward=nomod.X", "model.reward: No module named 'nomod' in /"),
    ([SEVERAL, "model.reward.weights=[0,0]"], "model.reward.weights=[0.0, 0.0] are all 0."),
    (["trainer.callbacks=[EMA]", "trainer.callbacks[3].decay=1"], "trainer.callbacks[3] does not exist. Append an "),
    (
        ["trainer.callbacks=[EMA]", "trainer.callbacks.0.decay=1"],
        "trainer.callbacks is a list and has no option 0. Write trainer.callbacks[0].decay=...",
    ),
    ("trainer.callbacks=[EMA,EMA]", "Found more than one stateful callback of type `EMA`."),
    ("model.policy.lora_alpha=4", "model.policy.lora_alpha=4 has no effect with lora_rank=None. Set lora_alpha"),
    ("model.policy.checkpoint=/none", "/none is not a folder. Set model.policy.checkpoint to"),
    ("model.reward=python:math:squirt", "model.reward.python=math:squirt cannot be imported"),
    ("model.reward+=JPEGCompressibility", "model.reward+= appends to a list, which model.reward is not."),
    *[
        (f"model.policy.dtype={short}", f"model.policy.dtype={short}: {FLOATS} Did you mean {meant}?")
        for short, meant in (("fp16", "float16"), ("bf16", "bfloat16"), ("half", "float16"))
    ],
    ("model.objective=PPO", "model.objective=PPO is not a known class. Use one of: DGPO, "),
    ("model.reward=Redness", "model.reward=Redness is not a known class. Use one of: "),
    ("rollout=3", "rollout is not an option of a recipe. Did you mean model.objective.rollout?"),
    ("model.reward=PickScore,HPSv2", "model.reward=PickScore,HPSv2 is not a known class. Did you mean PickScore?"),
    ("model.reward={JPEGCompressibility: {quality: 9}}", "model.reward names no class. Write {class_path: NAME, "),
    ("trainer.callbacks=[EMA: {decay: 0.9}]", "trainer.callbacks[0] names no class."),
    (
        "trainer.callbacks=[{class_path: EMA, decay: 0.9}]",
        "trainer.callbacks[0]: decay is an option of the class. Write {class_path: EMA, init_args: {decay: VALUE}}.",
    ),
    ("model.policy=3", "model.policy=3 names no class. Write {class_path: NAME, init_args: {OPTION: VALUE}}."),
    ("trainer.callbacks=[null]", "trainer.callbacks[0] names no class. Write {class_path: NAME, "),
    ("trainer.callbacks=3", "trainer.callbacks=3 names no class. Write [{class_path: NAME, "),
    ("trainer.callbacks=[os.getcwd]", "trainer.callbacks[0]=os.getcwd is not a Callback. Name one of its classes."),
    ("model.objective=os.path", "model.objective=os.path is not an Objective. Name one of its classes."),
    (
        "model.objective.times={gridd: 3}",
        "model.objective.times.gridd is not an option of TimeGrid. Did you mean grid?",
    ),
    (
        ["model.objective=DGPO", "model.objective.old_decay=abc"],
        "model.objective.old_decay='abc': Use a number",
    ),
    ("model.evaluation.steps=a", "model.evaluation.steps=a: Use an integer."),
    ("model.optimizer.lrr=3", "model.optimizer.lrr is not an option of OptimizerConfig. Did you mean lr?"),
    (
        [f"model.optimizer={ADAM}", "model.optimizer.lrr=3"],
        "model.optimizer.lrr is not an option of AdamW. Did you mea",
    ),
    (
        "model.optimizer=torch.optim.Adamm",
        "model.optimizer: module 'torch.optim' has no attribute 'Adamm'. Did you mean Adam?",
    ),
    ("model.optimizer.lr=small", "model.optimizer.lr=small: Use a number."),
    ("steps=3", "steps is not an option of a recipe. Did you mean model.objective.rollout.steps?"),
    (["model.policy=SD3Policy", "model.policy.init_args={}"], "The recipe lacks model.policy.checkpoint."),
    ("data.group_size=x", "data.group_size=x: Use an integer."),
    ("data.micro_batch_size=3", "data.micro_batch_size=3 cannot split"),
    ("model.seed=3", "model.seed follows seed_everything. Set seed_everything=3 instead."),
    ("seed_everything=-1", "seed_everything=-1 is invalid."),
    ("trainer.max_epochs=0", "trainer.max_epochs=0 is invalid. Use 1 or more, or -1."),
    ("trainer.barebones=true", "trainer.barebones=true switches off checkpoints, metrics and evaluations."),
    ("trainer.max_time=soon", "trainer.max_time: `Timer(duration='soon')` is not a valid duration."),
    ("trainer=gpu", "trainer=gpu is not a mapping. Set an option of it, such as trainer.max_epochs=20."),
    (".max_epochs=3", ".max_epochs is not an option of a recipe. Did you mean trainer.max_epochs?"),
    ("model.policy.checkpoint=", "model.policy.checkpoint= is empty. Name a pipeline"),
    ("model.reward=torch.nn.Linear", "model.reward=torch.nn.Linear is not a Reward."),
    ("data.train=3", "data.train=3: Use text, or a mapping"),
    ("data.train=[a.txt", "data.train=[a.txt is not YAML: "),
    ("seed=3", "seed is not an option of a recipe. Did you mean seed_everything?"),
    ("trainer.logger=WandbLoger", "trainer.logger=WandbLoger is not a known class. Did you mean WandbLogger?"),
    ("model.reward=a:score", "model.reward=a:score names no class. For a function, write model.reward.python=a:score."),
    ("model.optimizer={class_path: torch.optim.SGD, init_args: {lr: a}}", "model.optimizer.lr=a: Use"),
    ("trainer.callbacks=[[EMA]]", "trainer.callbacks[0]=['EMA'] names no class. Write {class_path: "),
    ("trainer.logger=[helpers.Unreachable, csv]", "trainer.logger: no server at localhost:1"),
    ("trainer.callbacks=[EMA, EarlyStopping]", "The recipe lacks monitor of one of trainer.callbacks. Write it as {"),
    (
        "model.policy=FluxPolicy",
        "The recipe lacks model.policy.checkpoint. FluxPolicy needs it: add model.policy.check",
    ),
    (["data.heldout=null", "data.heldout_fraction=0.999999"], "data.heldout_fraction=0.999999: "),
    ("model.objective.time_shift=3", "model.objective.time_shift=3.0 has no effect with times=sampler."),
    ("model.objective.rollout.noise_level=0.7", "model.objective.rollout.noise_level=0.7 has no effect with solver="),
    ("model.objective.rollout.window=[1,2]", "model.objective.rollout.window=(1, 2) has no effect with solver="),
    ("model.objective.rollout.solver=ueler", "model.objective.rollout.solver=ueler does not exist. Did you mean eu"),
    ("model.evaluation.noise_level=0.7", "model.evaluation.noise_level=0.7 has no effect with solver=None."),
    ("model.evaluation.shared_noise=true", "model.evaluation.shared_noise has no effect: held-out images form no"),
    ("model.objective.clip=0.01", "model.objective.clip=0.01 has no effect with updates_per_iteration=1"),
    ([STEPS, "model.lr_scheduler.step_size=0"], "model.lr_scheduler fails at step 1 of"),
    ([CYCLE, "model.lr_scheduler.total_steps=1"], "model.lr_scheduler fails at step 2 of 2: Tried to step"),
    ("trainer.accelerator=gup", "trainer.accelerator: You selected an invalid accelerator name:"),
    ("trainer.default_root_dir=x", "trainer.default_root_dir is set by the command. Use run_dir=... instead."),
    ("name=..", "name=.. is not the name of a folder in runs. For another folder, set run_dir=FOLDER."),
    ("name=a/b", "name=a/b is not the name of a folder in runs."),
    ("name=None", "name=None is Python syntax. Write name=null."),
]


@pytest.mark.parametrize(("words", "line"), LINES)
def test_an_error_is_one_line_with_the_key(tiny_recipe, words, line):
    try:
        (found,) = build(
            [str(tiny_recipe), *([words] if isinstance(words, str) else words)], make_folder=False
        ).errors()
    except UserError as error:
        (found,) = error.errors
    assert found.startswith(line)


def test_entries_of_lists_and_numbers_like_text(tiny_recipe):
    words = [
        SEVERAL,
        "model.reward.rewards[0].quality=20",
        "model.reward.weights=[1,2]",
        "name=007",
        "data.train.limit=2",
    ]
    cli = build(
        [str(tiny_recipe), *words, "trainer.callbacks+=EMA", "trainer.callbacks[0].decay=0.5"], make_folder=False
    )
    reward = cli.model.reward
    assert (reward.rewards[0].quality, [*reward.weight_of.values()], cli.config.name) == (20, [1, 2], "007")
    assert len([*cli.datamodule.training_rows()]) == 2, "an option of a plain path"
    assert [c.decay for c in cli.trainer.callbacks if type(c).__name__ == "EMA"] == [0.5]


def test_an_empty_name_is_that_of_the_file(tiny_recipe):
    assert f"{build([str(tiny_recipe), 'name='], make_folder=False).folder}" == "runs/tiny"


def test_another_class_leaves_the_options_of_the_recipes_class(tiny_recipe):
    words = [SEVERAL, "model.reward=JPEGCompressibility", "model.reward.quality=20"]
    assert build([str(tiny_recipe), *words], make_folder=False).model.reward.rewards[0].quality == 20


def test_numbers_may_come_from_the_environment(tiny_recipe, monkeypatch):
    monkeypatch.setenv("NUMBER", "2")
    monkeypatch.setenv("BETA", "0.9")
    words = ["model.objective.num_mc_samples=${oc.env:NUMBER}", "model.optimizer.betas=['${oc.env:BETA}',0.99]"]
    cli = build([str(tiny_recipe), *words], make_folder=False)
    assert cli.model.objective.num_mc_samples == 2
    assert cli.plain_recipe()["model"]["optimizer"]["betas"] == [0.9, 0.99]
