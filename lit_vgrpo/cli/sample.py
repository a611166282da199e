"""``lightning sample``: draw PNG files with a run's weights, sampled as in its evaluation."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from lit_vgrpo.cli.saved_policy import RunOptions, build_policy, load_saved_policy, recipe_of, saved_weights
from lit_vgrpo.config.parts import built_part
from lit_vgrpo.core.nonfinite import all_finite
from lit_vgrpo.core.pictures import PICTURE, picture_size, references_of
from lit_vgrpo.core.pixels import to_uint8
from lit_vgrpo.core.sampling import sample
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.data import read_prompts
from lit_vgrpo.data.rows import Row, Rows
from lit_vgrpo.errors import UserError
from lit_vgrpo.launch.checks import picture_errors
from lit_vgrpo.objectives.base import Objective
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.system.atomic_folder import DRAFT_PREFIX, vacant_folder
from lit_vgrpo.training.folder import candidates
from lit_vgrpo.training.saved_weights import REFERENCE

USED = ("model.policy", "model.objective", "model.evaluation")
LARGEST_SEED = 2**63 - 1


@dataclass(kw_only=True)
class SampleOptions(RunOptions):
    """Options of ``lightning sample``, whose help describes them.

    Attributes:
        rows: Prompts to draw, with the pictures that they edit.
    """

    reference: bool = False
    typed_prompts: list[str] = field(default_factory=list)
    prompt_file: str | None = None
    image: Path | None = None
    seed: int = 0
    count: int = 1
    steps: int | None = None
    guidance: float | None = None
    out: Any = None
    rows: Rows = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ema and self.reference:
            raise UserError("--ema and --reference are both given. Sample once with each, with the same --seed.")
        if self.seed + self.count - 1 > LARGEST_SEED:
            raise UserError(f"--seed {self.seed} is too large. Use {LARGEST_SEED - self.count + 1} or less.")
        self.rows = self._read_rows()
        if self.out is not None:
            self.out = vacant_folder(self.out)
        else:
            self.out = next(folder for folder in candidates(self.run / "sample") if not folder.exists())

    def _read_rows(self) -> Rows:
        if self.image is not None:
            try:
                picture_size(self.image)
            except ValueError as error:
                raise UserError(f"--image {error}") from error
        if self.typed_prompts and self.prompt_file is not None:
            raise UserError("--prompt and --prompts are both given. Use one of them.")
        if self.prompt_file is None:
            if not self.typed_prompts:
                raise UserError('No prompt given. Add --prompt "a red circle", or --prompts FILE.')
            rows: Rows = [{"prompt": prompt} for prompt in self.typed_prompts]
        else:
            try:
                rows = read_prompts(self.prompt_file)
            except (ValueError, ModuleNotFoundError) as error:
                raise UserError(str(error)) from error
        return rows if self.image is None else [{**row, PICTURE: str(self.image)} for row in rows]

    @property
    def variant(self) -> str:
        return REFERENCE if self.reference else super().variant

    @property
    def seeds(self) -> range:
        """Seeds of the images of each prompt."""
        return range(self.seed, self.seed + self.count)


def sample_images(options: SampleOptions) -> int:
    """Draw prompts: ``RUN --prompt TEXT [--seed 0] [--count 1] [--reference] [--ema] ... [key=value ...]``.

    Returns:
        0; 2 for an error in the arguments, or a folder that cannot be written; 130 after Ctrl-C.
    """
    recipe = recipe_of(options.run, options.words, USED, "sampling")
    policy, spec = build_policy(recipe), spec_of(recipe, options)
    if spec.solver not in policy.solvers:
        raise UserError(
            f"model.evaluation.solver={spec.solver} is not an ODE solver of {type(policy).__name__}. "
            f"Use {' or '.join(policy.solvers)}."
        )
    if spec.guidance != 1.0 and (error := policy.guidance_error()) is not None:
        raise UserError(f"guidance={spec.guidance:g}: {error}")
    if errors := picture_errors(policy, options.rows, fix="Add --image FILE"):
        raise UserError(*errors)
    saved = None
    if options.variant != REFERENCE:
        saved = saved_weights(options.run, options.checkpoint, options.variant)
    load_saved_policy(policy, saved, options.variant)
    policy.to("cuda" if torch.cuda.is_available() else "cpu")
    draw(policy, spec, options)
    return 0


def spec_of(recipe: dict[str, Any], options: SampleOptions) -> RolloutSpec:
    """Return the sampling settings of the run's evaluation, with the options applied.

    Raises:
        UserError: With every error in the parts of the recipe that define them.
    """
    spec = built_part(recipe, "model.evaluation", RolloutSpec)
    if spec is None:
        objective = built_part(recipe, "model.objective", Objective)
        if objective is None:
            raise UserError("The run's recipe has no model.objective. Is it the config.yaml of a run?")
        spec = objective.rollout_spec(0).as_ode()
    asked = {"steps": options.steps, "guidance": options.guidance}
    return replace(spec, **{name: value for name, value in asked.items() if value is not None})


def draw(policy: Policy, spec: RolloutSpec, options: SampleOptions) -> None:
    """Write an image for every prompt and seed, and print its path.

    Raises:
        UserError: It cannot be written.
    """
    hidden = not sys.stderr.isatty()
    bar = tqdm(total=len(options.rows) * len(options.seeds), leave=False, disable=hidden)
    for number, row in enumerate(options.rows, start=1):
        for seed in options.seeds:
            path = options.out / f"{number:03d}_seed{seed}.png"
            try:
                write_png(image_of(policy, spec, row, seed), path)
            except OSError as error:
                reason = error.strerror or error
                raise UserError(f"Cannot write {path}: {reason}. Set --out to another folder.") from error
            bar.update()
            tqdm.write(str(path))
    bar.close()


def image_of(policy: Policy, spec: RolloutSpec, row: Row, seed: int) -> Tensor:
    """Sample an image ``(3, H, W)`` in [0, 1] that depends on its row, its seed and the weights alone.

    The noise is what the family's pipeline draws with a CPU generator of the seed. Each image is sampled on its own,
    since a batch rounds differently.

    Raises:
        UserError: It holds NaN or infinite values, which a file would show as black, or its picture does not fit.
    """
    prompt = row["prompt"]
    try:
        cond = policy.encode([prompt], references_of([row]))
    except ValueError as error:
        raise UserError(str(error)) from error
    noise = policy.prior([torch.Generator().manual_seed(seed)])
    latents, _ = sample(policy, cond, torch.zeros(1, dtype=torch.long), spec, noise)
    image = policy.decode(latents)[0]
    if not all_finite([latents, image]):
        raise UserError(
            f'The image of prompt "{prompt}", seed {seed}, has values that are not finite and was not written. '
            "Try model.policy.dtype=float32, a lower --guidance, or an earlier checkpoint with --checkpoint FILE."
        )
    return image


def write_png(image: Tensor, path: Path) -> None:
    """Write an image ``(3, H, W)`` in [0, 1] as a whole file or not at all.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(DRAFT_PREFIX + path.name)
    Image.fromarray(to_uint8(image).permute(1, 2, 0).cpu().numpy()).save(draft, format="PNG")
    os.replace(draft, path)
