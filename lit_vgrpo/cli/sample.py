"""``lightning sample``: write images or videos from a run's weights, sampled as in its evaluation."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_vgrpo.cli.saved_policy import ChosenRun, build_policy, load_saved_policy, recipe_of
from lit_vgrpo.core.pictures import PICTURE, references_of
from lit_vgrpo.core.pixels import save_webp, strips, to_pil
from lit_vgrpo.core.sampling import sample
from lit_vgrpo.core.snapshots import all_finite
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.data import read_prompts
from lit_vgrpo.data.prompts import Row, Rows
from lit_vgrpo.errors import UserError, say
from lit_vgrpo.launch.checks import picture_errors
from lit_vgrpo.options import Sample
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.system.paths import new_file, typed_path, vacant_folder, write_error
from lit_vgrpo.system.process import bar
from lit_vgrpo.training.evaluation import evaluation_of, sides_of
from lit_vgrpo.training.folder import candidates
from lit_vgrpo.training.saved_weights import REFERENCE

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".mp4")
USED = ("model.policy", "model.objective", "model.evaluation")


def sample_images(options: Sample) -> int:
    """Draw prompts: ``RUN --prompt TEXT [--seed 0] [--count 1] [--reference | --no-ema] ... [key=value ...]``."""
    run, rows = ChosenRun.of(options), rows_of(options)
    free = (path for path in candidates(run.folder / "sample") if not path.exists())
    folder = next(free) if options.out is None else vacant_folder(str(options.out))
    if (is_file := folder.suffix.lower() in PICTURES) and (len(rows) * options.count > 1 or folder.suffix != ".png"):
        raise UserError(f"--out {options.out} is the name of a file. Name a folder, or for a single image a .png.")
    recipe = recipe_of(run.folder, run.words, USED, "sampling")
    policy, spec = build_policy(recipe), spec_of(recipe, options)
    try:
        with policy.sized(*sides_of(spec)):
            errors = picture_errors(policy, rows, fix="Add --image FILE")
        if errors:
            raise UserError(*errors)
        saved, variant = (None, REFERENCE) if options.reference else run.read_weights()
        load_saved_policy(policy, saved, variant)
        policy.to("cuda" if torch.cuda.is_available() else "cpu")
        with bar("Images", total=len(rows) * options.count) as drawn:
            for number, row in enumerate(rows, start=1):
                for seed in range(options.seed, options.seed + options.count):
                    path = typed_path(folder if is_file else folder / f"{number:03d}_seed{seed}.png")
                    image = image_of(policy, spec, row, seed)
                    write_frames(strips(image[None]), path)
                    if image.ndim == 4:
                        path = path.with_suffix(f".{options.format}")
                        write_frames(image, path, policy.frames_per_second)
                    drawn.update()
                    say(f"{path}")
        say(f"Sampled with the {saved.origin(variant) if saved else 'reference weights'}.", error=True)
    except ValueError as error:
        raise UserError(str(error)) from error
    return 0


def rows_of(options: Sample) -> Rows:
    """Return the prompts to draw, with the pictures that they edit; raise UserError if the options do not fit."""
    if options.no_ema and options.reference:
        raise UserError("--no-ema and --reference are both given. Sample once with each, with the same --seed.")
    if options.prompts is None and not options.prompt:
        raise UserError('No prompt given. Add --prompt "a red circle", or --prompts FILE.')
    if options.format == "mp4" and not (find_spec("imageio") and find_spec("imageio_ffmpeg")):
        raise UserError('--format mp4 needs imageio and imageio-ffmpeg. Run: pip install "lit-vgrpo[video]"')
    try:
        rows = read_prompts(options.prompts, edits=False) if options.prompts is not None else []
    except (ValueError, ModuleNotFoundError) as error:
        raise UserError(str(error)) from error
    pictures = {PICTURE: [str(file) for file in options.image]} if options.image else {}
    return [{**row, **pictures} for row in (*rows, *({"prompt": prompt} for prompt in options.prompt or []))]


def spec_of(recipe: dict[str, Any], options: Sample) -> RolloutSpec:
    """Return the sampling settings of the run's evaluation, with the options applied."""
    asked: dict[str, Any] = {"steps": options.steps, "guidance": options.guidance}
    return replace(evaluation_of(recipe), **{name: value for name, value in asked.items() if value is not None})


def image_of(policy: Policy, spec: RolloutSpec, row: Row, seed: int) -> Tensor:
    """Sample an image ``(3, H, W)``, or a video ``(F, 3, H, W)``, in [0, 1], from the row, seed and weights alone.

    The noise is what the family's pipeline draws with a CPU generator of the seed. Each image is sampled alone,
    since a batch rounds differently.

    Raises:
        UserError: The image holds NaN or infinite values, which a file would show as black.
    """
    prompt = row["prompt"]
    with policy.sized(*sides_of(spec)):
        cond = policy.encode([prompt], references_of([row]))
        noise = policy.prior([torch.Generator().manual_seed(seed)])
        latents, _ = sample(policy, cond, torch.zeros(1, dtype=torch.long), spec, noise)
        image = policy.decode(latents)[0]
    if not all_finite([latents, image]):
        raise UserError(
            f'The image of prompt "{prompt}", seed {seed}, has values that are not finite. Try '
            "model.policy.dtype=float32, or an earlier checkpoint with --checkpoint FILE."
        )
    return image


def write_frames(frames: Tensor, path: Path, frames_per_second: int = 1) -> None:
    """Write an image or a video to a file atomically; raise UserError if it cannot be written.

    Args:
        frames: Shape ``(F, 3, H, W)``, float in [0, 1]; an image has F = 1.
        path: Ends in ``.png``, ``.webp`` (lossless), or ``.mp4`` (H.264 needs even sides, so an odd side repeats its
            last pixels).
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as file:
            if path.suffix == ".mp4":
                from diffusers.utils import export_to_video

                even = F.pad(frames, (0, frames.shape[-1] % 2, 0, frames.shape[-2] % 2), mode="replicate")
                # the default block size of 16 would rescale frames to its multiples
                export_to_video(to_pil(even), file.name, frames_per_second, quality=8, macro_block_size=1)
            elif path.suffix == ".webp":
                save_webp(to_pil(frames), file, round(1000 / frames_per_second), lossless=True)
            else:
                to_pil(frames)[0].save(file, format="PNG")
    except OSError as error:
        raise UserError(f"Cannot write {path}: {write_error(error)}. Set --out to another folder.") from error
