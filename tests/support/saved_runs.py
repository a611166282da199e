"""Finished runs in a folder, for the tests of what reads them, and what those tests have in common."""

import io
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest
import torch
from commands import export, run
from helpers import SMALL_PICTURES
from processes import draw_with_diffusers

from lit_vgrpo.cli.sample import image_of
from lit_vgrpo.cli.saved_policy import build_policy, load_saved_policy, recipe_of
from lit_vgrpo.core.pictures import references_of
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.policies.checks import call_of
from lit_vgrpo.training.saved_weights import SavedWeights

SEED, STEPS, GUIDANCE = 3, 3, 2.0


@contextmanager
def folder_with(folder, recipe, checkpoint, prompts):
    """A folder as the working directory, with the recipe as tiny.yaml, in which CHECKPOINT is replaced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("train.txt").write_text("\n".join(prompts))
        Path("tiny.yaml").write_text(recipe.replace("CHECKPOINT", str(checkpoint)))
        yield


def train(*words):
    assert run(["tiny.yaml", *words]) == 0


def assert_one_line(command, words, capsys, line, starts=False):
    """The command refuses its words with one line that holds, or starts with, ``line``, and prints nothing else."""
    assert command(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(line) if starts else line in err
    assert err.count("\n") == 1, err


def load_run(folder, variant):
    """The policy of a run with one of its sets of weights."""
    policy = build_policy(recipe_of(Path(folder), [], ["model.policy"], "a test"))
    saved = None if variant == "reference" else SavedWeights.read(Path(folder, "checkpoints", "last.ckpt"))
    return load_saved_policy(policy, saved, variant)


def draw_exports(cases, folder):
    """Return images of each export: by plain diffusers with the printed lines, by our sampler, and of the start.

    A case is a working folder, a run, its set of weights, options of the export, a prompt's row, a solver, and the
    settings of a scheduler that a pipeline must be told to sample as the policy does.
    """
    jobs, images = [], []
    for number, (place, name, variant, options, row, solver, scheduler) in enumerate(cases):
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
            patch.chdir(place)
            assert export([name, "--to", str(folder / str(number)), *options]) == 0
            spec = RolloutSpec(solver, STEPS, GUIDANCE)
            start, policy = image_of(load_run(name, "reference"), spec, row, SEED), load_run(name, variant)
            images.append((image_of(policy, spec, row, SEED), start))
            edited = references_of([row])
            pictures = None if edited is None else torch.stack(edited).float() / 255
            noise = policy.prior([torch.Generator().manual_seed(SEED)])
        files = {name: str(folder / f"{number}.{name}") for name in ("call", "image")}
        torch.save(call_of(policy, [row["prompt"]], noise, STEPS, GUIDANCE, pictures), files["call"])
        lines = [*SMALL_PICTURES, *out.getvalue().splitlines()[1:]]
        jobs.append({"lines": lines, "scheduler": dict(scheduler), **files})
    draw_with_diffusers(jobs, folder)
    return [(torch.load(job["image"]), *ours) for job, ours in zip(jobs, images, strict=True)]
