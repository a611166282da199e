"""``lightning eval RUN_OR_MODEL ... --benchmark NAME``: scores of runs and models under a published protocol."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from lit_vgrpo import policies
from lit_vgrpo.apps.benchmark.result import OVERALL, markdown, report_of
from lit_vgrpo.apps.benchmark.scores import Subject, fill
from lit_vgrpo.cli.saved_policy import ChosenRun, build_policy, load_saved_policy, recipe_of
from lit_vgrpo.config.recipe import find_run, is_override
from lit_vgrpo.config.tree import apply_override
from lit_vgrpo.data.benchmark import Benchmark, read_benchmark
from lit_vgrpo.data.benchmark_prompts import read_rows
from lit_vgrpo.errors import UserError, counted, say, suggestion
from lit_vgrpo.options import Evaluate
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.loading import config_folder, find_pipeline_class
from lit_vgrpo.policies.meta import NotEstimated, policy_on_meta
from lit_vgrpo.report.run_data import BENCHMARKS
from lit_vgrpo.system.hub import SMALL_FILES, LoadError, base_name, local_folder
from lit_vgrpo.system.paths import check_writable, import_from_here, typed_path, write_atomically
from lit_vgrpo.training.saved_weights import REFERENCE, SavedWeights, checkpoint_hash, start_hashes
from lit_vgrpo.training.settings import UnscorablePrompts

POLICY = "model.policy"
READ = ("*.safetensors", "*.bin", *SMALL_FILES)
"""Files of a model on which its images depend."""
PLACES = ("", "*/", "*/*/")
"""Folders of a model with such files; they may be links, which ``**`` does not follow."""


def evaluate_benchmark(options: Evaluate) -> int:
    """Sample and score a benchmark's images, and write the result; return 1 if a model has no score at all."""
    settings = [word for word in options.words if is_override(word)]
    models = [word for word in options.words if word not in settings]
    overrides = [word for word in settings if word.startswith(f"{POLICY}.")]
    benchmark = read_benchmark(str(options.benchmark), [word for word in settings if word not in overrides])
    first, _, last = (options.share or "1/1").partition("/")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise UserError(f"--share {options.share} is not a share. Write --share 2/8 for the second of eight.")
    if options.named is not None and len(models) > 1:
        raise UserError("--checkpoint is for a single run. Name the checkpoint files as runs instead.")
    if options.out is not None:
        check_writable(options.out)
    import_from_here()
    names = {word: _name(word) for word in models}
    labels = {word: name if [*names.values()].count(name) == 1 else word for word, name in names.items()}
    subjects = [one for pair in labels.items() for one in _subjects(*pair, benchmark, overrides, options)]
    reward = benchmark.build_reward()
    given = [None if path is None else typed_path(path) for path in (options.prompts, options.pictures)]
    rows = read_rows(benchmark, *given)
    if errors := [*reward.check(), *UnscorablePrompts.of(reward, rows).refused(any_failure=True)]:
        raise UserError(*errors)
    images = counted(benchmark.images_per_prompt, "image")
    say(f"{benchmark.title}: {counted(len(rows), 'prompt')} x {images} per model")
    fill(subjects, benchmark, rows, reward, (int(first), int(last)))
    if int(last) > 1:
        say(f"Scored share {options.share}. After all of them, run the same command without --share.")
        return 0
    report = report_of(benchmark, rows, subjects)
    stems = [subject.stem for subject in subjects]
    name = stems[0] if len(stems) == 1 else f"{benchmark.name}-{sha256(' '.join(stems).encode()).hexdigest()[:10]}"
    path = typed_path(options.out or subjects[0].folder / f"{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = markdown(report)
    write_atomically(path, json.dumps(report, indent=2, ensure_ascii=False, default=str) + "\n")
    write_atomically(path.with_suffix(".md"), text)
    say(text.partition("\n## Protocol")[0])
    say(f"Result and full protocol: {path.with_suffix('.md')} and {path}")
    overall = [one[OVERALL] for model_scores in report["scores"].values() for one in model_scores.values()]
    return int(any(one["mean"] is None for one in overall))


def _name(word: str) -> str:
    """Return a short name of a run or model; others may have it too."""
    return base_name(word) if _is_model(word) else find_run(word)[0].resolve().name


def _subjects(word: str, label: str, benchmark: Benchmark, overrides: list[str], options: Evaluate) -> list[Subject]:
    """Return a run's or model's columns of the table; raise UserError if it does not fit the benchmark."""
    edits = benchmark.prompts.picture is not None
    sizes = {"height": benchmark.height, "width": benchmark.width}
    words = [*overrides, *(f"{POLICY}.{name}={size}" for name, size in sizes.items() if size is not None)]
    if _is_model(word):
        tree: dict[str, Any] = {"model": {"policy": _class_of_model(word, edits)}}
        for override in words:
            key, _, text = override.partition("=")
            apply_override(tree, key, text)
        weights: dict[str, Any] = {REFERENCE: {"model": word}}
        folder, saved = Path(BENCHMARKS), None
    else:
        run = ChosenRun.of(replace(options, words=[word]))
        tree = recipe_of(run.folder, words, [POLICY], "a benchmark")
        saved, variant = run.read_weights()
        about = {"checkpoint": f"{saved.path}", "optimizer_steps": saved.progress.optimizer_steps}
        weights = {variant: {**about, "content": checkpoint_hash(saved.path)}}
        folder = run.folder / BENCHMARKS
    policy = build_policy(tree)
    if policy.edits != edits:
        what, kind = ("edits pictures" if one else "generates from prompts alone" for one in (edits, policy.edits))
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
        if saved is not None and options.reference:
            weights[REFERENCE] = start_hashes(policy)
    except LoadError as error:
        errors.append(str(error))
    if errors:
        raise UserError(*(f"{word}: {error}" for error in errors))
    sources = {"version" if saved is None else "base": policy.checkpoint, **policy.components}
    versions = {
        name: _version(source, policy.revision)
        for name, source in sources.items()
        if name == "version" or local_folder(source) is not None  # another hub model may not be downloaded yet
    }
    return [
        Subject(
            label if saved is None else f"{label} {name}",
            {"weights": name, **about, **versions, "policy": tree["model"]["policy"]},
            solver,
            partial(_load, tree, saved, name),
            folder,
        )
        for name, about in weights.items()
    ]


def _load(tree: dict[str, Any], saved: SavedWeights | None, variant: str) -> Policy:
    return load_saved_policy(build_policy(tree), saved, variant)  # built only now: a subject that is done frees its own


def _is_model(word: str) -> bool:
    """Return True for a pipeline's folder or a hub name, False for anything that can only be a run."""
    try:
        folder = local_folder(word)
    except ValueError as error:
        raise UserError(str(error)) from error
    if folder is not None:
        return config_folder(word) is not None
    return "/" in word and not word.startswith("runs/")


def _class_of_model(checkpoint: str, edits: bool) -> dict[str, Any]:
    """Return a model's policy as in a recipe, from the class of its pipeline."""
    try:
        name = find_pipeline_class(checkpoint, what_to_set="MODEL")
    except LoadError as error:
        raise UserError(str(error).replace("set MODEL=", "name ")) from error
    kinds = (getattr(policies, known) for known in policies.__all__)
    fitting = [kind for kind in kinds if getattr(kind, "pipeline_class", None) == name]
    if not fitting:
        return {"class_path": "AutoPolicy", "init_args": {"checkpoint": checkpoint, "references": int(edits)}}
    kind = next((kind for kind in fitting if kind.edits == edits), fitting[0])
    return {"class_path": kind.__name__, "init_args": {"checkpoint": checkpoint}}


def _version(checkpoint: str, revision: str | None) -> str:
    """Return a hub model's commit, or a hash of the names, sizes and dates of a local one's files."""
    folder = local_folder(checkpoint)
    if folder is None:
        return str(config_folder(checkpoint, revision)).rpartition("/")[2]
    found = {path for place in PLACES for pattern in READ for path in folder.glob(place + pattern)}
    files = [path for path in sorted(found) if path.is_file() and path.parent.name != BENCHMARKS]
    dates = [(f"{path.relative_to(folder)}", path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return sha256(repr(dates).encode()).hexdigest()[:16]
