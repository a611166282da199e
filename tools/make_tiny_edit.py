"""Write the pipeline and the pictures of the tiny editing task: a small Kontext pipeline that recolours shapes poorly.

python tools/make_tiny_edit.py --vae recipes/assets/tiny_sd3
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from PIL import Image
from tiny_pipelines import build_flux
from tiny_prompts import shape_rows
from torch import Tensor

from lit_vgrpo.core.pixels import to_uint8
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.policies import Conditioning, KontextPolicy, Policy
from lit_vgrpo.policies.flux import REFERENCE_LATENTS
from lit_vgrpo.tiny.shapes import COLOURS, IMAGE_SIZE, PLACES, SHAPES, edit_of, render

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
SIDES = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
TOKENS = 4  # of T5: three words and the end
_log = logging.getLogger(__name__)


def random_edits(count: int, generator: torch.Generator, prompt_noise: float = 0.0) -> tuple[Tensor, Tensor, list[str]]:
    """Render pictures, each in two colours, and the prompts from one to the other.

    Args:
        count: number of pairs.
        generator: source of all attributes, places and sizes.
        prompt_noise: probability that a prompt asks for another colour than that of the edited picture.

    Returns:
        The pictures before and after, ``(count, 3, 32, 32)`` each, in [0, 1], and the prompts.
    """

    def pick(most: int) -> int:
        return int(torch.randint(most, (1,), generator=generator))

    before: list[Tensor] = []
    after: list[Tensor] = []
    prompts: list[str] = []
    for _ in range(count):
        colours = torch.randperm(len(COLOURS), generator=generator).tolist()
        shape, place, seed = SHAPES[pick(len(SHAPES))], list(PLACES)[pick(len(PLACES))], pick(2**31)
        for pictures, colour in ((before, colours[0]), (after, colours[1])):
            same_place = torch.Generator().manual_seed(seed)
            pictures.append(render(COLOURS[colour], shape, place, generator=same_place))
        is_wrong = float(torch.rand(1, generator=generator)) < prompt_noise
        prompts.append(edit_of(COLOURS[colours[2 + pick(len(COLOURS) - 2)] if is_wrong else colours[1]]))
    return torch.stack(before), torch.stack(after), prompts


def pretrain(policy: KontextPolicy, seed: int, steps: int, batch_size: int, prompt_noise: float) -> None:
    """Train a policy's network to denoise edited pictures under prompts that are often wrong, and average its weights.

    Args:
        policy: loaded, with full weights.
        seed: of pictures, times and noise.
        steps: optimizer steps.
        batch_size: pairs of pictures per step.
        prompt_noise: probability that a prompt asks for another colour.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts = [edit_of(colour) for colour in COLOURS]
    with torch.no_grad():
        texts = Conditioning(policy.encode_prompts(prompts))

    def batch() -> tuple[Tensor, Conditioning]:
        before, after, asked = random_edits(batch_size, generator, prompt_noise)
        with torch.no_grad():
            latents, x = (policy.vae_encode(pictures * 2 - 1) for pictures in (before, after))
        rows = torch.tensor([prompts.index(prompt) for prompt in asked])
        return x, Conditioning({**texts.select(rows).tensors, REFERENCE_LATENTS: latents})

    train_to_denoise(policy, steps, batch, generator)


def train_to_denoise(
    policy: Policy, steps: int, batch: Callable[[], tuple[Tensor, Conditioning]], generator: torch.Generator
) -> None:
    """Train a policy's weights on clean latents with their conditioning, and replace them by their average.

    Args:
        batch: draws the latents and the conditioning of one step.
        generator: of times and noise.
    """
    weights = trainable_parameters(policy)
    averages = {name: weight.detach().clone() for name, weight in weights.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.05)
    for step in range(steps):
        x, cond = batch()
        t = (torch.randperm(len(x), generator=generator) + torch.rand(1, generator=generator)) / len(x)
        eps = torch.randn(x.shape, generator=generator)
        loss = (policy(policy.path.interpolate(x, eps, t), t, cond) - (eps - x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        schedule.step()
        for name, weight in weights.items():
            averages[name].lerp_(weight.detach(), min(0.01, 1 / (1 + step)))
        if step % 100 == 0:
            _log.info("step %d: loss %.3f", step, loss.item())
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(averages[name])


def write_task(folder: Path, seed: int) -> None:
    """Write the pictures, and the prompts that recolour them: ``edit_train.jsonl`` and ``edit_heldout.jsonl``.

    Every picture is asked for in each colour that it does not have, one round of all pictures after the other.
    """
    generator = torch.Generator().manual_seed(seed)
    pictures = folder / "assets" / "tiny_edit_pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    for name, known in zip(("train", "heldout"), shape_rows(), strict=True):
        rows = []
        for number, row in enumerate(known):
            own = {key: row[key] for key in ("colour", "shape", "place")}
            file = pictures / f"{name}_{number:02d}.png"
            pixels = to_uint8(render(**own, generator=generator)).permute(1, 2, 0).numpy()
            Image.fromarray(pixels).save(file, optimize=True)
            others = [colour for colour in COLOURS if colour != own["colour"]]
            others = others[number % len(others) :] + others[: number % len(others)]
            rows.append(
                [{"prompt": edit_of(colour), "image": f"../assets/{pictures.name}/{file.name}"} for colour in others]
            )
        lines = [json.dumps(row) for of_round in zip(*rows, strict=True) for row in of_round]
        (folder / "prompts" / f"edit_{name}.jsonl").write_text("\n".join(lines) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write both, and print the pipeline's folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vae", required=True, help="pipeline folder whose autoencoder to reuse")
    parser.add_argument("--out", type=Path, default=RECIPES, help="folder with assets/ and prompts/ to write to")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps of the pre-training")
    parser.add_argument("--batch-size", type=int, default=64, help="pairs of pictures per step")
    parser.add_argument("--prompt-noise", type=float, default=0.45, help="probability that a prompt's colour is wrong")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    (args.out / "prompts").mkdir(parents=True, exist_ok=True)
    write_task(args.out, args.seed)
    vae = AutoencoderKL.from_pretrained(args.vae, subfolder="vae")
    with tempfile.TemporaryDirectory() as start:
        words = ["make", "it", *COLOURS]
        build_flux(start, args.seed, vae, layers=1, guidance_embeds=False, dynamic_shift=False, edits=True, words=words)
        policy = KontextPolicy(start, max_sequence_length=TOKENS, **SIDES)
        policy.load()
        pretrain(policy, args.seed, args.steps, args.batch_size, args.prompt_noise)
        print(policy.save(args.out / "assets" / "tiny_edit"))


if __name__ == "__main__":
    main()
