"""Finished runs in a folder, for the tests of what reads them, and what those tests have in common."""

import io
from contextlib import chdir, contextmanager, redirect_stdout
from pathlib import Path

import torch
import yaml
from commands import export, run
from helpers import SMALL_PICTURES
from processes import draw_with_diffusers

from lit_vgrpo.cli.sample import image_of
from lit_vgrpo.cli.saved_policy import build_policy, load_saved_policy, recipe_of
from lit_vgrpo.core.pictures import references_of
from lit_vgrpo.core.pixels import to_pil
from lit_vgrpo.training.checkpoint_file import read
from lit_vgrpo.training.evaluation import evaluation_of
from lit_vgrpo.training.saved_weights import SavedWeights

SEED, STEPS, GUIDANCE = 3, 3, 2.0
IN_16 = "model.policy.dtype=bfloat16"


@contextmanager
def folder_with(folder, recipe, checkpoint, prompts):
    """A folder as the working directory, with the recipe as tiny.yaml, in which CHECKPOINT is replaced."""
    with chdir(folder):
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


def load_run(folder, variant, words=()):
    """The policy of a run with one of its sets of weights, and with overrides of its recipe."""
    policy = build_policy(recipe_of(Path(folder), words, ["model.policy"], "a test"))
    saved = None if variant == "reference" else SavedWeights.read(Path(folder, "checkpoints", "last.ckpt"))
    return load_saved_policy(policy, saved, variant)


def assert_same(theirs, ours, options, most=0.33):
    """Images are the same; in 16 bits up to rounding in grey levels, of which a VAE in 16 bits would add as much."""
    if IN_16 in options:
        assert 255 * (theirs - ours).abs().mean() < most
    else:
        torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=2e-4)


def draw_exports(cases, folder):
    """Return images of each export: by plain diffusers with the printed lines, by our sampler, and of the start.

    A case is a working folder, a run, its set of weights, options of the export, a prompt's row, and its evaluation's
    settings.
    """
    jobs, images = [], []
    for number, (place, name, variant, options, row, evaluation) in enumerate(cases):
        with chdir(place), redirect_stdout(io.StringIO()) as out:
            config = Path(name, "config.yaml")
            recipe = yaml.safe_load(config.read_text())
            recipe["model"]["evaluation"] = {"steps": STEPS, "guidance": GUIDANCE, **evaluation}
            config.write_text(yaml.safe_dump(recipe))
            assert export([name, "--to", str(folder / str(number)), *options]) == 0
            spec = evaluation_of(recipe)
            words = [option for option in options if option.startswith("model.")]
            policies = [load_run(name, one, words) for one in (variant, "reference")]
            images.append([image_of(policy, spec, row, SEED) for policy in policies])
            edited = references_of([row])
        given = {"prompt": row["prompt"]}
        files = [] if edited is None else to_pil(edited[0].unflatten(0, (-1, 3)).flatten(0, -4) / 255)
        given |= {f"picture_{number}" if files[1:] else "picture": file for number, file in enumerate(files, start=1)}
        files = {name: str(folder / f"{number}.{name}") for name in ("given", "image")}
        torch.save(given, files["given"])
        jobs.append({"lines": [*SMALL_PICTURES, *out.getvalue().splitlines()[1:]], "seed": SEED, **files})
    draw_with_diffusers(jobs, folder)
    return [(torch.load(job["image"]), *ours) for job, ours in zip(jobs, images, strict=True)]


def assert_resumed_alike(folder):
    """Check that the run ``half``, which was resumed, ended like the run ``whole``; return their checkpoints."""
    whole, half = (read(folder / name / "checkpoints" / "last.ckpt") for name in ("whole", "half"))
    for state in ("state_dict", "callbacks", "optimizer_states"):
        torch.testing.assert_close(half[state], whole[state], rtol=0, atol=0)
    return whole, half
