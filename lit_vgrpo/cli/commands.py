"""Commands of ``lightning`` with their options; each imports its implementation when it runs, so help is instant."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from lit_vgrpo import __version__, errors, options
from lit_vgrpo.options import HUB_PREFIX
from lit_vgrpo.system.process import bar, is_first_process, report_on_first

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
    from lit_vgrpo.system.paths import shipped

    files = [str(path) for path in Path().glob(f"{incomplete}*") if path.is_dir() or path.suffix in (".yaml", ".yml")]
    return [name for name in shipped() if name.startswith(incomplete)] + files


RecipeArg = Annotated[str, Argument(help="Shipped recipe, file, or folder with a recipe.", autocompletion=_recipes)]
Words = Annotated[
    list[str] | None, Argument(metavar="[OVERLAY|key=value]", help="Files merged over the recipe, and overrides.")
]
Run = Annotated[str, Argument(help="Run folder, such as runs/tiny_shapes.")]
Settings = Annotated[list[str] | None, Argument(metavar="[key=value]", help="Overrides of the run's recipe.")]
RewardArg = Annotated[str, Argument(metavar="REWARD", help="Class, python:my_module:my_function, or recipe.")]


def add_command(name: str, options: type, panel: str, place: str, **arguments: Any) -> None:
    """Add a command whose options are the fields, and whose help is the docstring, of a class of options.

    A field without an ``Option`` is no option: ``words`` gets the arguments, ``line`` the command as typed.

    Args:
        panel: Heading in the help.
        place: ``module:function`` that runs it, given the options; imported only then.
        arguments: Type hints of the arguments; ``words`` after another one may be left out.
    """
    hints = get_type_hints(options, include_extras=True)
    shown: dict[str, tuple[Any, Any]] = {"ctx": (typer.Context, Parameter.empty)}
    for argument, hint in arguments.items():
        shown[argument] = hint, None if argument == "words" and len(arguments) > 1 else Parameter.empty
    for field in fields(options):
        if get_origin(hint := hints[field.name]) is Annotated:
            shown[field.name] = hint, Parameter.empty if field.default is MISSING else field.default

    def call(ctx: typer.Context, **given: Any) -> int:
        from lit_vgrpo.config.recipe import find_run, find_runs, read_early, refuse_unreadable
        from lit_vgrpo.system.paths import vacant_folder

        words = [given.pop(argument) for argument in arguments]
        given["words"] = [word for one in words for word in ([one] if isinstance(one, str) else one or [])]
        if "line" in hints:
            given["line"] = errors.shell_line("lightning", *(ctx.obj or []))
        # These raise UserError for what does not exist or cannot be read, before the slow imports.
        refuse_unreadable(given["words"])
        if "recipe" in arguments and name != "compare":  # which also continues a race
            read_early(given["words"])
        elif "runs" in arguments:
            find_runs(given["words"][0])
        elif "run" in arguments and not (given.get("benchmark") or given.get("share")):
            find_run(given["words"][0])
        if not (to := given.get("to") or HUB_PREFIX).startswith(HUB_PREFIX):
            vacant_folder(to)
        with _loading():
            body = resolve_name(f"lit_vgrpo.{place}")
        return int(body(options(**given)))

    parameters = [Parameter(name, Parameter.KEYWORD_ONLY, default=d, annotation=h) for name, (h, d) in shown.items()]
    call.__signature__, call.__annotations__ = Signature(parameters), {}  # type: ignore[attr-defined]
    app.command(name, help=options.__doc__, rich_help_panel=panel)(call)


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
    checkpoint: Annotated[
        str | None, Option(metavar="NAME", help="Pipeline of diffusers to train: a hub name or a folder.")
    ] = None,
) -> int:
    """Write a recipe, prompts and a reward to start from."""
    from lit_vgrpo.cli.init import write_starter

    return write_starter(folder, source, checkpoint)


@app.command(rich_help_panel=START)
def recipes(
    names: Annotated[list[str] | None, Argument(help="Recipes; all by default.", autocompletion=_recipes)] = None,
    task: Annotated[
        options.Task | None, Option(metavar="TASK", help=f"Details for a task: {', '.join(get_args(options.Task))}.")
    ] = None,
    gpu: Annotated[
        int | None,
        Option(parser=options.gpu_memory_of, metavar="SIZE", help="Details of what fits one GPU, such as 48GiB."),
    ] = None,
) -> int:
    """List the shipped recipes, or show the needs and evidence of some."""
    from lit_vgrpo.cli.recipes import list_recipes

    return list_recipes(names or [], task, gpu)


add_command("check", options.Check, START, "cli.check:check_command", recipe=RecipeArg, words=Words)


@app.command(rich_help_panel=TRAIN)
def run(recipe: RecipeArg, words: Words = None, resume: options.Resume = False) -> int:
    """Train a recipe or a curriculum.

    Every option of a recipe can be overridden, such as model.objective=DiffusionNFT data.group_size=8
    trainer.max_epochs=20. Other keys of the top level: name, run_dir, seed_everything, ckpt_path, allow_changes.
    """
    from lit_vgrpo.config.recipe import read_early

    command, is_curriculum = read_early([recipe, *(words or [])], resume)
    if is_curriculum:
        with _loading(recipe):
            from lit_vgrpo.apps.curriculum.curriculum import run_curriculum
        return run_curriculum(command)
    with _loading(recipe):
        from lit_vgrpo.launch.build import train_recipe
    return train_recipe(command)


Voted = Annotated[list[str], Argument(metavar="RUN|RECIPE", help="Run folder, or recipe to train, with its overrides.")]
Shown = Annotated[list[str], Argument(help="Run folders, such as runs/tiny_shapes, or a folder of runs.")]
Evaluated = Annotated[str, Argument(help="Run folder; with --benchmark also a pipeline folder or hub name.")]
More = Annotated[list[str] | None, Argument(metavar="[RUN|MODEL|key=value]", help="More runs or models; overrides.")]
Scored = Annotated[list[str] | None, Argument(metavar="[IMAGE|FOLDER|key=value]")]
Served = Annotated[list[str] | None, Argument(metavar="[key=value]", help="Options of the reward.")]

add_command("compare", options.Compare, TRAIN, "apps.compare.command:compare", recipe=RecipeArg, words=Words)
add_command("vote", options.Vote, TRAIN, "apps.vote.command:vote", words=Voted)
add_command("report", options.Report, LOOK, "apps.report.command:report", runs=Shown)
add_command("eval", options.Evaluate, LOOK, "cli.eval:evaluate", run=Evaluated, words=More)
add_command("sample", options.Sample, LOOK, "cli.sample:sample_images", run=Run, words=Settings)
add_command("score", options.Score, LOOK, "cli.score:score", reward=RewardArg, words=Scored)
add_command("check-reward", options.CheckReward, LOOK, "cli.check_reward:check_reward", recipe=RecipeArg, words=Words)
add_command("export", options.Export, SHARE, "cli.export:export", run=Run, words=Settings)
add_command("serve-reward", options.ServeReward, SHARE, "apps.serve.command:serve", reward=RewardArg, words=Served)


@contextmanager
def _loading(recipe: str = "") -> Iterator[None]:
    """Announce slow imports, and disable garbage collection during them: they create a million permanent objects.

    Without a terminal, which shows a bar, a line names the ``recipe``.
    """
    if "torch" in sys.modules:
        yield
        return
    if recipe and not sys.stderr.isatty():
        report_on_first(f"Loading {recipe} ...")
    gc.disable()
    try:
        with bar("Loading the libraries", total=1):
            yield
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # the collection at the end looks for leaks
