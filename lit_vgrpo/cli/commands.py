"""Commands of ``lightning`` with their options; each imports its implementation when it runs, so help is instant."""

from __future__ import annotations

import atexit
import gc
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from lit_vgrpo import __version__, errors, options
from lit_vgrpo.errors import UserError
from lit_vgrpo.system.process import is_first_process

START, TRAIN, LOOK, SHARE = "Start", "Train", "Look", "Share"


class Commands(TyperGroup):
    """Command group that handles Ctrl-C in every command."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            if is_first_process():
                errors.report(["Stopped."])
            return 130


app = typer.Typer(
    cls=Commands, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


def _recipes(incomplete: str) -> list[str]:
    from lit_vgrpo.config.recipe import shipped_recipes

    files = [str(path) for path in Path().glob(f"{incomplete}*") if path.is_dir() or path.suffix in (".yaml", ".yml")]
    return [name for name in shipped_recipes() if name.startswith(incomplete)] + files


RecipeArg = Annotated[str, Argument(help="Shipped recipe, file or run folder.", autocompletion=_recipes)]
Words = Annotated[
    list[str] | None, Argument(metavar="[OVERLAY|key=value]", help="Files merged over the recipe, and overrides.")
]
Run = Annotated[str, Argument(help="Run folder, such as runs/tiny_shapes.")]
Settings = Annotated[list[str] | None, Argument(metavar="[key=value]", help="Overrides of the run's recipe.")]
RewardArg = Annotated[str, Argument(metavar="REWARD", help="Class, python:my_module:my_function, or recipe.")]
Given = dict[str, Any]
"""Values of the fields of a command's class of options."""
Loaded = tuple[Callable[[Any], int], type]
"""A command's implementation, and the class of its argument, made from the options."""
Load = Callable[[Given], Loaded]


class _Callback:
    """What Typer calls for a command: its parameters are the arguments, then the options of a class.

    A field without an ``Option`` is no option: ``words`` gets the arguments, ``line`` the command as typed.
    """

    def __init__(self, options: type, load: Load, arguments: dict[str, Any]) -> None:
        self.load, self.arguments = load, arguments
        self.__doc__, self.__annotations__ = load.__doc__, {}
        hints = get_type_hints(options, include_extras=True)
        self.has_line = "line" in hints
        parameters = [Parameter("ctx", Parameter.KEYWORD_ONLY, annotation=typer.Context)]
        for name, hint in arguments.items():
            default = None if name == "words" and len(arguments) > 1 else Parameter.empty
            parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint))
        for field in fields(options):
            if get_origin(hint := hints[field.name]) is Annotated:
                default = Parameter.empty if field.default is MISSING else field.default
                parameters.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint))
        self.__signature__ = Signature(parameters)

    def __call__(self, ctx: typer.Context, **given: Any) -> int:
        words = [given.pop(name) for name in self.arguments]
        given["words"] = [word for one in words for word in ([one] if isinstance(one, str) else one or [])]
        if self.has_line:
            given["line"] = shlex.join(["lightning", *(ctx.obj or [])])
        with _loading():
            body, options = self.load(given)
        return body(options(**given))


def command(options: type, panel: str, **arguments: Any) -> Callable[[Load], Load]:
    """Add a command whose options are the fields of a class of :mod:`lit_vgrpo.options`.

    Args:
        panel: Heading in the help.
        arguments: Type hints of the arguments; ``words`` after another one may be left out.
    """

    def add(load: Load) -> Load:
        app.command(load.__name__.replace("_", "-"), rich_help_panel=panel)(_Callback(options, load, arguments))
        return load

    return add


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
def run(recipe: RecipeArg, words: Words = None, resume: options.Resume = False) -> int:
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


@command(options.Compare, TRAIN, recipe=RecipeArg, words=Words)
def compare(given: Given) -> Loaded:
    """Race training methods on one task, or continue a race."""
    from lit_vgrpo.apps.compare.command import compare as body
    from lit_vgrpo.apps.compare.options import CompareOptions

    return body, CompareOptions


@command(options.Vote, TRAIN, words=Annotated[list[str], Argument(metavar="RUN|RECIPE")])
def vote(given: Given) -> Loaded:
    """Show the page on which people choose the best images."""
    from lit_vgrpo.apps.vote import command as body

    return body.vote, body.VoteOptions


@command(options.Report, LOOK, runs=Annotated[list[str], Argument(help="Run folders, shown side by side.")])
def report(given: Given) -> Loaded:
    """Write runs as one HTML page."""
    from lit_vgrpo.apps.report import command as body

    return body.report, body.ReportOptions


@command(
    options.Evaluate,
    LOOK,
    run=Annotated[str, Argument(help="Run folder; with --benchmark also a pipeline folder or hub name.")],
    words=Annotated[
        list[str] | None, Argument(metavar="[RUN|MODEL|key=value]", help="More runs or models; overrides.")
    ],
)
def eval(given: Given) -> Loaded:
    """Score a run's weights on its held-out prompts, or runs and models on a benchmark."""
    has_benchmark = given["benchmark"] is not None
    for name in ("fid_reference", "features") if has_benchmark else ("prompts", "pictures", "share"):
        if given[name] is not None:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} has no effect with{'out' * (not has_benchmark)} --benchmark NAME. Leave it out.")
    if has_benchmark:
        from lit_vgrpo.cli.benchmark import BenchmarkOptions, evaluate_benchmark

        return evaluate_benchmark, BenchmarkOptions
    from lit_vgrpo.cli.eval import EvaluateOptions, evaluate

    return evaluate, EvaluateOptions


@command(options.Sample, LOOK, run=Run, words=Settings)
def sample(given: Given) -> Loaded:
    """Generate images with a run's weights."""
    from lit_vgrpo.cli.sample import SampleOptions, sample_images

    return sample_images, SampleOptions


@command(
    options.Score,
    LOOK,
    reward=RewardArg,
    words=Annotated[list[str] | None, Argument(metavar="[IMAGE|FOLDER|key=value]")],
)
def score(given: Given) -> Loaded:
    """Score image files with a reward."""
    from lit_vgrpo.cli import score as body

    return body.score, body.ScoreOptions


@command(options.CheckReward, LOOK, recipe=RecipeArg, words=Words)
def check_reward(given: Given) -> Loaded:
    """Try a recipe's rewards on a few images."""
    from lit_vgrpo.cli.check_reward import check_reward as body

    return body, options.CheckReward


@command(options.Export, SHARE, run=Run, words=Settings)
def export(given: Given) -> Loaded:
    """Write a run's weights for diffusers, or publish them."""
    from lit_vgrpo.cli import export as body

    return body.export, body.ExportOptions


@command(
    options.ServeReward,
    SHARE,
    reward=RewardArg,
    words=Annotated[list[str] | None, Argument(metavar="[key=value]", help="Options of the reward.")],
)
def serve_reward(given: Given) -> Loaded:
    """Score images over HTTP for other machines."""
    from lit_vgrpo.apps.serve.command import print_setup, serve

    return print_setup if given["print_setup"] else serve, options.ServeReward


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
