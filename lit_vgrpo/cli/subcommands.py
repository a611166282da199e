"""The subcommands of ``lightning``: where each is, its usage and its help. Imports the standard library only."""

from __future__ import annotations

from typing import NamedTuple


class Subcommand(NamedTuple):
    """Subcommand: ``module:function``, ``module:Class`` of its options, and its help."""

    target: str
    options: str
    usage: str
    summary: str
    example: str
    takes_recipe: bool = False
    ends_quickly: bool = False
    needs_arguments: bool = True


SUBCOMMANDS: dict[str, Subcommand] = {
    "run": Subcommand(
        "lit_vgrpo.cli.run:run",
        "lit_vgrpo.config.recipe:Command",
        "RECIPE.yaml [OVERLAY.yaml ...] [key=value ...] [--resume]",
        "train a recipe or a curriculum; shipped recipes go by name",
        "run tiny_shapes model.objective=DiffusionNFT trainer.max_epochs=20",
        takes_recipe=True,
    ),
    "check": Subcommand(
        "lit_vgrpo.cli.check:check",
        "lit_vgrpo.cli.check:CheckOptions",
        "RECIPE.yaml [OVERLAY.yaml ...] [key=value ...] [--memory 80GiB] [--untrusted]",
        "find all errors in a recipe without training; --untrusted lists the code, variables and hosts it names",
        "check sd3_pickscore model.policy.checkpoint=/a/local/sd35m --memory 48GiB",
        takes_recipe=True,
        ends_quickly=True,
    ),
    "recipes": Subcommand(
        "lit_vgrpo.cli.recipes:recipes",
        "lit_vgrpo.cli.recipes:RecipesOptions",
        "[RECIPE ...]",
        "list the shipped recipes: what each needs, and whether it was measured",
        "recipes tiny_shapes sd3_pickscore",
        needs_arguments=False,
    ),
    "init": Subcommand(
        "lit_vgrpo.cli.init:init",
        "lit_vgrpo.cli.init:InitOptions",
        "FOLDER",
        "write a recipe, prompts and a reward to start from, which run as they are on a tiny pipeline",
        "init my_run",
    ),
    "eval": Subcommand(
        "lit_vgrpo.cli.eval:evaluate",
        "lit_vgrpo.cli.eval:EvaluateOptions",
        "RUN [--ema] [--reference] [--checkpoint FILE] [--fid-reference FOLDER] [--features NETWORK] [--out FILE.json] "
        "[key=value ...]",
        "score the held-out prompts with a run's weights, with confidence intervals",
        "eval runs/tiny_shapes --ema --reference",
    ),
    "export": Subcommand(
        "lit_vgrpo.cli.export:export",
        "lit_vgrpo.cli.export:ExportOptions",
        "RUN --to DIR|hub:OWNER/NAME [--format kohya] [--ema] [--merge] [--dtype bfloat16] [--checkpoint FILE] "
        "[--public] [--yes] [key=value ...]",
        "write a run's LoRA, or its weights as a pipeline folder, for diffusers to load; to a hub after you confirm",
        "export runs/tiny_shapes --to exports/tiny_shapes --ema",
    ),
    "sample": Subcommand(
        "lit_vgrpo.cli.sample:sample_images",
        "lit_vgrpo.cli.sample:SampleOptions",
        "RUN --prompt TEXT [--prompt TEXT ... | --prompts FILE] [--image FILE] [--seed 0] [--count 1] [--reference] "
        "[--ema] [--checkpoint FILE] [--steps N] [--guidance G] [--out DIR] [key=value ...]",
        "generate images with a run's weights and save them as PNGs",
        'sample runs/tiny_shapes --prompt "a red circle on the left" --count 4',
    ),
    "report": Subcommand(
        "lit_vgrpo.apps.report.command:report",
        "lit_vgrpo.apps.report.command:ReportOptions",
        "RUN [RUN ...] [--out FILE.html] [--serve] [--port 8008]",
        "write a run, or several side by side, as one HTML page; --serve shows it while they train",
        "report runs/tiny_shapes runs/tiny_shapes_DiffusionNFT --out both.html",
    ),
    "vote": Subcommand(
        "lit_vgrpo.apps.vote.command:vote",
        "lit_vgrpo.apps.vote.command:VoteOptions",
        "RUN | RECIPE.yaml [OVERLAY.yaml ...] [key=value ...] [--resume] [--port 8009] [--host 127.0.0.1] "
        "[--token-env NAME] [--seed 0]",
        "show the page on which people choose the best images, beside a run or while training a recipe",
        "vote tiny_shapes model.reward=VoteReward model.heldout_reward=ShapesReward",
    ),
    "compare": Subcommand(
        "lit_vgrpo.apps.compare.command:compare",
        "lit_vgrpo.apps.compare.options:CompareOptions",
        "RECIPE.yaml [key=value ...] [--methods vgrpo,mixgrpo,...] [--seeds 3] [--target 0.6,0.7] "
        "[--base vgrpo] [--settings published,tuned] [--iterations N] [--evaluate-every 5] [--jobs 2] [--first-seed 0] "
        "[--out FOLDER] [--sweep]",
        "race training methods on one task; run it again to continue after an interruption",
        "compare tiny_shapes --methods vgrpo,mixgrpo,nft --seeds 3 --target 0.7",
        takes_recipe=True,
    ),
    "score": Subcommand(
        "lit_vgrpo.cli.score:score",
        "lit_vgrpo.cli.score:ScoreOptions",
        "REWARD_OR_RECIPE IMAGE_OR_FOLDER ... [--prompt TEXT | --prompts FILE] [--out FILE.json|.csv] [--batch-size 1] "
        "[key=value ...]",
        "score image files with a reward: each part and the total",
        'score PickScore photo.png --prompt "two cats"',
    ),
    "check-reward": Subcommand(
        "lit_vgrpo.cli.check_reward:check_reward",
        "lit_vgrpo.cli.check_reward:CheckRewardOptions",
        "RECIPE.yaml [OVERLAY.yaml ...] [key=value ...] [--images FOLDER] [--num-prompts 4] [--images-per-prompt 2]",
        "try a recipe's rewards on a few images: scores, failures, time, memory",
        "check-reward tiny_shapes --num-prompts 8",
        takes_recipe=True,
    ),
    "serve-reward": Subcommand(
        "lit_vgrpo.apps.serve.command:serve",
        "lit_vgrpo.apps.serve.options:ServeOptions",
        "REWARD_OR_RECIPE [key=value ...] [--host 127.0.0.1] [--port 8000] [--token-env NAME] [--device cpu|cuda:0] "
        "[--batch-size 32] [--max-wait-ms 5] [--max-request-mb 64] [--max-images 256] [--max-megapixels 4]",
        "score images over HTTP for runs on other machines",
        "serve-reward HPSv2 --port 8000",
    ),
}
