"""Commands of ``lightning`` with their options; each imports its implementation when it runs, so help is instant."""

from __future__ import annotations

import atexit
import gc
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from lit_vgrpo import __version__
from lit_vgrpo.errors import UserError, report
from lit_vgrpo.system.process import is_first_process

START, TRAIN, LOOK, SHARE = "Start", "Train", "Look", "Share"


class Commands(TyperGroup):
    """Command group that handles Ctrl-C in every command."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            if is_first_process():
                report(["Stopped."])
            return 130


app = typer.Typer(
    cls=Commands, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


def _recipes(incomplete: str) -> list[str]:
    from lit_vgrpo.config.recipe import shipped_recipes

    files = [str(path) for path in Path().glob(f"{incomplete}*") if path.is_dir() or path.suffix in (".yaml", ".yml")]
    return [name for name in shipped_recipes() if name.startswith(incomplete)] + files


def _read_path(text: str) -> Path:
    return Path(text).expanduser()


def _read_token(variable: str) -> str:
    token = os.environ.get(variable, "").strip()
    if not token:
        raise UserError(f"{variable} is not set in the environment. Run: export {variable}=...")
    return token


RecipeArg = Annotated[str, Argument(help="Shipped recipe, file or run folder.", autocompletion=_recipes)]
Words = Annotated[
    list[str] | None, Argument(metavar="[OVERLAY|key=value]", help="Files merged over the recipe, and overrides.")
]
Run = Annotated[str, Argument(help="Run folder, such as runs/tiny_shapes.")]
Settings = Annotated[list[str] | None, Argument(metavar="[key=value]", help="Overrides of the run's recipe.")]
RewardArg = Annotated[str, Argument(metavar="REWARD", help="Class, python:my_module:my_function, or recipe.")]
Resume = Annotated[bool, Option("--resume", help="Continue in the run folder.")]
NoEma = Annotated[bool, Option("--no-ema", help="Use the trained weights themselves, not their average.")]
Checkpoint = Annotated[str | None, Option(help="Checkpoint to read; by default the last good one.")]
Host = Annotated[str, Option(help="Address to listen on.")]
Port = Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")]
Token = Annotated[str | None, Option(parser=_read_token, metavar="NAME", help="Environment variable with a secret.")]
Out = Annotated[Path | None, Option(parser=_read_path, metavar="PATH", help="File or folder to write.")]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"lit-vgrpo {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, Option("--version", "-V", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
    debug: Annotated[bool, Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Train diffusion models with reinforcement learning; try lightning run tiny_shapes."""


@app.command(rich_help_panel=START)
def init(
    folder: Annotated[str, Argument(help="New folder; its name becomes the run name.")],
    source: Annotated[
        str | None, Option("--from", help="Recipe to copy with its prompts.", autocompletion=_recipes)
    ] = None,
) -> int:
    """Write a recipe, prompts and a reward to start from."""
    from lit_vgrpo.cli.init import write_starter

    return write_starter(folder, source)


@app.command(rich_help_panel=START)
def recipes(
    names: Annotated[list[str] | None, Argument(help="Recipes; all by default.", autocompletion=_recipes)] = None,
) -> int:
    """List the shipped recipes with their needs and evidence."""
    from lit_vgrpo.cli.recipes import list_recipes

    return list_recipes(names or [])


@app.command(rich_help_panel=START)
def check(
    recipe: RecipeArg,
    words: Words = None,
    memory: Annotated[str | None, Option(help="Memory of the GPU to compare with, such as 80GiB.")] = None,
) -> int:
    """Find the errors of a recipe without training."""
    from lit_vgrpo.config.recipe import Command

    command = Command.parse([recipe, *(words or [])])
    with _loading():
        from lit_vgrpo.apps.memory.room import gpu_memory_of
        from lit_vgrpo.cli.check import check_command
    return check_command(command, None if memory is None else gpu_memory_of(memory))


@app.command(rich_help_panel=TRAIN)
def run(recipe: RecipeArg, words: Words = None, resume: Resume = False) -> int:
    """Train a recipe or a curriculum.

    Every option of a recipe can be overridden, such as model.objective=DiffusionNFT data.group_size=8
    trainer.max_epochs=20. Other keys of the top level: name, run_dir, seed_everything, ckpt_path, allow_changes.
    """
    from lit_vgrpo.config.recipe import STAGES, Command, loaded

    command = Command.parse([recipe, *(words or [])], resume)
    if STAGES in loaded(command.recipe):
        with _loading():
            from lit_vgrpo.apps.curriculum.curriculum import run_curriculum
        return run_curriculum(command)
    with _loading():
        from lit_vgrpo.launch.build import train_recipe
    return train_recipe(command)


@app.command(rich_help_panel=TRAIN)
def compare(
    ctx: typer.Context,
    recipe: RecipeArg,
    words: Words = None,
    methods: Annotated[str | None, Option(help="Shipped overlays or files, separated by commas.")] = None,
    seeds: Annotated[int | None, Option(min=1, help="Seeds per method; 3 by default, 1 in a sweep.")] = None,
    first_seed: Annotated[int | None, Option(min=0, help="First seed.")] = None,
    target: Annotated[str | None, Option(help="Target held-out rewards, such as 0.6,0.7.")] = None,
    base: Annotated[str | None, Option(help="Baseline method for relative costs.")] = None,
    settings: Annotated[str | None, Option(help="published, tuned or both, separated by a comma.")] = None,
    iterations: Annotated[int | None, Option(min=1, help="Iterations per run; by default the recipe's.")] = None,
    evaluate_every: Annotated[int, Option(min=1, help="Iterations between evaluations.")] = 5,
    jobs: Annotated[int | None, Option(min=1, help="Number of parallel runs.")] = None,
    out: Out = None,
    sweep: Annotated[bool, Option("--sweep", help="Search for each method's best settings instead.")] = False,
) -> int:
    """Race training methods on one task, or continue a race."""
    with _loading():
        from lit_vgrpo.apps.compare import options as read
        from lit_vgrpo.apps.compare.command import compare as body
    options = read.CompareOptions(
        words=[recipe, *(words or [])],
        methods=list(read.DEFAULT_METHODS) if methods is None else read.read_names(methods),
        num_seeds=seeds,
        first_seed=first_seed,
        targets=[] if target is None else read.read_rewards(target),
        base_method=base,
        settings=None if settings is None else read.read_settings(settings),
        iterations=iterations,
        evaluate_every=evaluate_every,
        jobs=jobs,
        out=out,
        sweep=sweep,
        line=shlex.join(["lightning", *(ctx.obj or [])]),
    )
    return body(options)


@app.command(rich_help_panel=TRAIN)
def vote(
    words: Annotated[list[str], Argument(metavar="RUN|RECIPE")],
    resume: Resume = False,
    host: Host = "127.0.0.1",
    port: Port = 8009,
    token_env: Token = None,
) -> int:
    """Show the page on which people choose the best images."""
    with _loading():
        from lit_vgrpo.apps.vote.command import VoteOptions
        from lit_vgrpo.apps.vote.command import vote as body
    return body(VoteOptions(words=words, host=host, port=port, token=token_env, resume=resume))


@app.command("report", rich_help_panel=LOOK)
def report_runs(
    runs: Annotated[list[str], Argument(help="Run folders, shown side by side.")],
    out: Out = None,
    serve: Annotated[bool, Option("--serve", help="Serve the page while the runs train; write no file.")] = False,
    port: Port = 8008,
) -> int:
    """Write runs as one HTML page."""
    with _loading():
        from lit_vgrpo.apps.report.command import ReportOptions
        from lit_vgrpo.apps.report.command import report as body
    return body(ReportOptions(words=runs, out=out, serve=serve, port=port))


@app.command("eval", rich_help_panel=LOOK)
def evaluate(
    run: Annotated[str, Argument(help="Run folder; with --benchmark also a pipeline folder or hub name.")],
    words: Annotated[
        list[str] | None, Argument(metavar="[RUN|MODEL|key=value]", help="More runs or models; overrides.")
    ] = None,
    benchmark: Annotated[str | None, Option(metavar="NAME", help="Use a published protocol, such as geneval.")] = None,
    prompts: Annotated[str | None, Option(metavar="PATH", help="Local copy of the benchmark's prompts.")] = None,
    pictures: Annotated[str | None, Option(metavar="DIR", help="Pictures that the benchmark edits.")] = None,
    share: Annotated[str | None, Option(metavar="I/N", help="Score the I-th of N shares of its images.")] = None,
    no_ema: NoEma = False,
    reference: Annotated[bool, Option("--reference", help="Evaluate the reference too.")] = False,
    checkpoint: Checkpoint = None,
    fid_reference: Annotated[str | None, Option(help="Real images, or a file of their statistics.")] = None,
    features: Annotated[str | None, Option(help="Feature network of FID and diversity.")] = None,
    out: Out = None,
) -> int:
    """Score a run's weights on its held-out prompts, or runs and models on a benchmark."""
    for_benchmark = {"--prompts": prompts, "--pictures": pictures, "--share": share}
    unused = for_benchmark if benchmark is None else {"--fid-reference": fid_reference, "--features": features}
    for option in (option for option, value in unused.items() if value is not None):
        raise UserError(f"{option} has no effect with{'out' * (benchmark is None)} --benchmark NAME. Leave it out.")
    given: dict[str, Any] = {"words": [run, *(words or [])], "no_ema": no_ema, "named": checkpoint, "out": out}
    with _loading():
        from lit_vgrpo.cli import eval as held_out
    if benchmark is not None:
        from lit_vgrpo.cli.benchmark import BenchmarkOptions, evaluate_benchmark

        given |= {"prompts": prompts, "pictures": pictures, "shares": share}
        return evaluate_benchmark(BenchmarkOptions(name=benchmark, reference=reference, **given))
    options = held_out.EvaluateOptions(reference=reference, features=features, fid_reference=fid_reference, **given)
    return held_out.evaluate(options)


@app.command(rich_help_panel=LOOK)
def sample(
    run: Run,
    words: Settings = None,
    prompt: Annotated[list[str] | None, Option(help="Prompt; may be repeated.")] = None,
    prompts: Annotated[str | None, Option(help="File of prompts.")] = None,
    image: Annotated[list[Path] | None, Option(parser=_read_path, metavar="FILE", help="Pictures to edit.")] = None,
    seed: Annotated[int, Option(min=0, help="Seed of the first image of each prompt.")] = 0,
    count: Annotated[int, Option(min=1, help="Images per prompt, each with the next seed.")] = 1,
    reference: Annotated[bool, Option("--reference", help="Use the reference's weights.")] = False,
    no_ema: NoEma = False,
    checkpoint: Checkpoint = None,
    steps: Annotated[int | None, Option(min=1, max=1000, help="Sampling steps; by default the recipe's.")] = None,
    guidance: Annotated[float | None, Option(min=1, max=1000, help="Guidance scale; 1 disables it.")] = None,
    format: Annotated[Literal["webp", "mp4"], Option(help="File format of videos.")] = "webp",
    out: Out = None,
) -> int:
    """Generate images with a run's weights."""
    with _loading():
        from lit_vgrpo.cli.sample import SampleOptions, sample_images
    given: dict[str, Any] = {"words": [run, *(words or [])], "no_ema": no_ema, "named": checkpoint, "out": out}
    given |= {"reference": reference, "typed_prompts": prompt or [], "prompt_file": prompts, "image": image}
    given |= {"seed": seed, "count": count, "steps": steps, "guidance": guidance, "format": format}
    return sample_images(SampleOptions(**given))


@app.command(rich_help_panel=LOOK)
def score(
    reward: RewardArg,
    words: Annotated[list[str] | None, Argument(metavar="[IMAGE|FOLDER|key=value]")] = None,
    prompt: Annotated[str | None, Option(help="Prompt for all images.")] = None,
    prompts: Annotated[str | None, Option(help="File with one prompt per image.")] = None,
    out: Out = None,
    batch_size: Annotated[int, Option(min=1, help="Images per call of the reward.")] = 1,
) -> int:
    """Score image files with a reward."""
    with _loading():
        from lit_vgrpo.cli.score import ScoreOptions
        from lit_vgrpo.cli.score import score as body
    options = ScoreOptions(
        words=[reward, *(words or [])], prompt=prompt, prompts=prompts, out=out, batch_size=batch_size
    )
    return body(options)


@app.command(rich_help_panel=LOOK)
def check_reward(
    recipe: RecipeArg,
    words: Words = None,
    images: Annotated[str | None, Option(help="Images to score; by default sampled from the policy.")] = None,
    num_prompts: Annotated[int, Option(min=1, help="Number of training prompts to use.")] = 4,
    images_per_prompt: Annotated[int, Option(min=1, help="Images per prompt.")] = 2,
) -> int:
    """Try a recipe's rewards on a few images."""
    with _loading():
        from lit_vgrpo.cli.check_reward import check_reward as body
    return body([recipe, *(words or [])], images, num_prompts, images_per_prompt)


@app.command(rich_help_panel=SHARE)
def export(
    run: Run,
    to: Annotated[str, Option(help="New or empty folder, or hub:OWNER/NAME.")],
    words: Settings = None,
    format: Annotated[Literal["diffusers", "kohya", "comfyui"], Option(help="File format of a LoRA.")] = "diffusers",
    no_ema: NoEma = False,
    merge: Annotated[bool, Option("--merge", help="Merge the LoRA into the base weights.")] = False,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], Option(help="Dtype of the files.")] = "float32",
    checkpoint: Checkpoint = None,
    public: Annotated[bool, Option("--public", help="With hub:, create a public repository.")] = False,
    yes: Annotated[bool, Option("--yes", help="With hub:, upload without asking.")] = False,
) -> int:
    """Write a run's weights for diffusers, or publish them."""
    with _loading():
        from lit_vgrpo.cli.export import ExportOptions, read_target
        from lit_vgrpo.cli.export import export as body
        from lit_vgrpo.policies.base import DTYPES
    options = ExportOptions(
        words=[run, *(words or [])],
        to=read_target(to),
        format=format,
        no_ema=no_ema,
        merge=merge,
        dtype=DTYPES[dtype],
        named=checkpoint,
        public=public,
        yes=yes,
    )
    return body(options)


@app.command(rich_help_panel=SHARE)
def serve_reward(
    reward: RewardArg,
    words: Annotated[list[str] | None, Argument(metavar="[key=value]", help="Options of the reward.")] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token_env: Token = None,
    device: Annotated[str | None, Option(help="cpu or cuda:0; by default a GPU if there is one.")] = None,
    batch_size: Annotated[int, Option(min=1, help="Images per call of the reward, or 16 megapixels.")] = 32,
    max_request_mb: Annotated[int, Option(min=1, help="Maximum size of a request in MB.")] = 64,
    max_images: Annotated[int, Option(min=1, help="Maximum images per request.")] = 256,
    max_megapixels: Annotated[int, Option(min=1, max=85, help="Maximum size of an image in megapixels.")] = 4,
    print_setup: Annotated[bool, Option("--print-setup", help="Print the commands that install a judge.")] = False,
) -> int:
    """Score images over HTTP for other machines."""
    with _loading():
        from lit_vgrpo.apps.serve import command
    if print_setup:
        return command.print_setup(reward)
    options = command.ServeOptions(
        words=[reward, *(words or [])],
        host=host,
        port=port,
        token=token_env,
        device=device,
        batch_size=batch_size,
        max_request_mb=max_request_mb,
        max_images=max_images,
        max_megapixels=max_megapixels,
    )
    return command.serve(options)


@contextmanager
def _loading() -> Iterator[None]:
    """Announce slow imports, and disable garbage collection during them: they create a million permanent objects."""
    if "torch" in sys.modules:
        yield
        return
    shows = sys.stderr is not None and sys.stderr.isatty()
    if shows:
        print("Loading ...", end="\r", file=sys.stderr, flush=True)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # the collection at the end looks for leaks
        if shows:
            print("           ", end="\r", file=sys.stderr, flush=True)
