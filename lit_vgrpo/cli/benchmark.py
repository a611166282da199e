"""``lightning eval RUN_OR_MODEL ... --benchmark NAME``: scores of runs and models under a published protocol."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from lit_vgrpo import policies
from lit_vgrpo.apps.benchmark.result import OVERALL, markdown, report_of
from lit_vgrpo.apps.benchmark.scores import Subject, fill
from lit_vgrpo.cli.saved_policy import RunOptions, build_policy, load_saved_policy, recipe_of
from lit_vgrpo.config.recipe import is_override
from lit_vgrpo.config.tree import apply_override
from lit_vgrpo.data.benchmark import Benchmark, read_benchmark
from lit_vgrpo.data.benchmark_prompts import read_rows
from lit_vgrpo.errors import UserError, counted, say, suggestion
from lit_vgrpo.launch.checks import UnscorablePrompts
from lit_vgrpo.options import Evaluate
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.loading import INDEX, config_folder, find_pipeline_class
from lit_vgrpo.policies.meta import NotEstimated, policy_on_meta
from lit_vgrpo.report.run_data import BENCHMARKS
from lit_vgrpo.system.hub import LoadError, base_name, local_folder
from lit_vgrpo.system.paths import import_from_here, typed_path, write_atomically
from lit_vgrpo.training.saved_weights import REFERENCE, SavedWeights

POLICY = "model.policy"


@dataclass(kw_only=True)
class BenchmarkOptions(Evaluate):
    """Options of ``lightning eval --benchmark``.

    Attributes:
        subjects: The runs and models.
        overrides: Overrides of the policy.
        preset: The benchmark with its overrides.
        part: Index of the share of images to score, and number of shares.
    """

    subjects: list[str] = field(init=False)
    overrides: list[str] = field(init=False)
    preset: Benchmark = field(init=False)
    part: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        settings = [word for word in self.words if is_override(word)]
        self.subjects = [word for word in self.words if word not in settings]
        self.overrides = [word for word in settings if word.startswith(f"{POLICY}.")]
        self.preset = read_benchmark(str(self.benchmark), [word for word in settings if word not in self.overrides])
        first, _, last = (self.share or "1/1").partition("/")
        if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise UserError(f"--share {self.share} is not a share. Write --share 2/8 for the second of eight.")
        self.part = int(first), int(last)
        if self.named is not None and len(self.subjects) > 1:
            raise UserError("--checkpoint is for a single run. Name the checkpoint files as runs instead.")
        if self.out is not None and self.out.suffix != ".json":
            raise UserError(f"--out {self.out} is not a JSON file. Use --out {self.out.with_suffix('.json')}.")


def evaluate_benchmark(options: BenchmarkOptions) -> int:
    """Sample and score a benchmark's images, and write the result as JSON and Markdown.

    Returns:
        0; 1 if a model has no score at all; 2 for an error in the arguments; 130 after Ctrl-C.
    """
    import_from_here()
    benchmark = options.preset
    subjects = [subject for word in options.subjects for subject in _subjects(word, options)]
    reward = benchmark.build_reward()
    given = [None if path is None else typed_path(path) for path in (options.prompts, options.pictures)]
    rows = read_rows(benchmark, *given)
    if errors := [*reward.check(), *UnscorablePrompts.of(reward, rows).refused(any_failure=True)]:
        raise UserError(*errors)
    say(
        f"{benchmark.title}: {counted(len(rows), 'prompt')} x {counted(benchmark.images_per_prompt, 'image')} per model"
    )
    fill(subjects, benchmark, rows, reward, options.part)
    if options.part[1] > 1:
        say(f"Scored share {options.share}. After all of them, run the same command without --share.")
        return 0
    report = report_of(benchmark, rows, subjects)
    names = [subject.stem(benchmark, rows).name for subject in subjects]
    name = names[0] if len(names) == 1 else f"{benchmark.name}-{sha256(' '.join(names).encode()).hexdigest()[:10]}"
    path = typed_path(options.out or subjects[0].folder / f"{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = markdown(report)
    write_atomically(path, json.dumps(report, indent=2, ensure_ascii=False, default=str) + "\n")
    write_atomically(path.with_suffix(".md"), text)
    say(text.partition("\n## Protocol")[0])
    say(f"Result and full protocol: {path.with_suffix('.md')} and {path}")
    overall = [one[OVERALL] for model_scores in report["scores"].values() for one in model_scores.values()]
    return int(any(one["mean"] is None for one in overall))


def _subjects(word: str, options: BenchmarkOptions) -> list[Subject]:
    """Return a run's or model's columns of the table; raise UserError if it does not fit the benchmark."""
    benchmark = options.preset
    edits = benchmark.prompts.picture is not None
    sizes = {"height": benchmark.height, "width": benchmark.width}
    words = [*options.overrides, *(f"{POLICY}.{name}={size}" for name, size in sizes.items() if size is not None)]
    if _is_model(word):
        tree: dict[str, Any] = {"model": {"policy": _class_of_model(word, edits)}}
        for override in words:
            key, _, text = override.partition("=")
            apply_override(tree, key, text)
        weights: dict[str, Any] = {REFERENCE: {"model": word, "version": _version(word)}}
        label, folder, saved = base_name(word), Path(BENCHMARKS), None
    else:
        run = RunOptions(words=[word], no_ema=options.no_ema, named=options.named)
        tree = recipe_of(run.run, words, [POLICY], "a benchmark")
        saved, variant = run.read_weights()
        about = {"checkpoint": f"{saved.path}", "optimizer_steps": saved.progress.optimizer_steps}
        weights = {variant: about, **({REFERENCE: {}} if options.reference else {})}
        label, folder = run.run.resolve().name, run.run / BENCHMARKS
    policy = build_policy(tree)
    if policy.edits != edits:
        what = "edits pictures" if edits else "generates from prompts alone"
        kind = "edits pictures" if policy.edits else "generates from prompts alone"
        raise UserError(f"{benchmark.name} {what}, but {word} is of {type(policy).__name__}, which {kind}.")
    solver = benchmark.solver or policy.solvers[0]
    if solver not in policy.solvers:
        raise UserError(f"solver={solver} is not one of {type(policy).__name__}. {suggestion(solver, policy.solvers)}")
    errors = policy.check()
    if benchmark.guidance != 1 and (error := policy.guidance_error()) is not None:
        errors.append(error)
    try:
        with suppress(NotEstimated):  # finds, without weights, a size that the family cannot sample
            policy_on_meta(policy)
    except LoadError as error:
        errors.append(str(error))
    if errors:
        raise UserError(*(f"{word}: {error}" for error in errors))
    return [
        Subject(
            label if saved is None else f"{label} {name}",
            {"weights": name, **about, "policy": tree["model"]["policy"]},
            solver,
            partial(_load, tree, saved, name),
            folder,
        )
        for name, about in weights.items()
    ]


def _load(tree: dict[str, Any], saved: SavedWeights | None, variant: str) -> Policy:
    return load_saved_policy(build_policy(tree), saved, variant)


def _is_model(word: str) -> bool:
    """Return True for a pipeline's folder or a hub name, False for anything that can only be a run."""
    try:
        folder = local_folder(word)
    except ValueError as error:
        raise UserError(str(error)) from error
    if folder is not None:
        return (folder / INDEX).is_file()
    return "/" in word and not word.startswith("runs/")


def _class_of_model(checkpoint: str, edits: bool) -> dict[str, Any]:
    """Return a model's policy as in a recipe, from the class of its pipeline."""
    try:
        name = find_pipeline_class(checkpoint, what_to_set="MODEL")
    except LoadError as error:
        raise UserError(str(error).replace("set MODEL=", "name ")) from error
    kinds = [getattr(policies, known) for known in policies.__all__]
    fitting = [kind for kind in kinds if getattr(kind, "pipeline_class", None) == name]
    if not fitting:
        raise UserError(f"{checkpoint} is a {name}, which no family supports. See docs/models.md.")
    kind = next((kind for kind in fitting if kind.edits == edits), fitting[0])
    return {"class_path": kind.__name__, "init_args": {"checkpoint": checkpoint}}


def _version(checkpoint: str) -> Any:
    """Return a hub model's commit, or the files of a local one with sizes and dates, to detect changes."""
    folder = local_folder(checkpoint)
    if folder is None:
        return str(config_folder(checkpoint)).rpartition("/")[2]
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(folder.rglob("*.safetensors"))]
