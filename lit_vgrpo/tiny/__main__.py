"""``python -m lit_vgrpo.tiny``: write the files of the tiny tasks."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence

from lit_vgrpo.tiny import shapes, words


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m lit_vgrpo.tiny", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    prompts = verbs.add_parser("prompts", help="the prompt files of both tasks")
    prompts.add_argument("folder")
    start = verbs.add_parser("start", help="a pipeline with a trained autoencoder and an untrained denoiser")
    start.add_argument("folder")
    start.add_argument("--kind", choices=["sd3", "unet"], default="sd3")
    start.add_argument("--task", choices=["shapes", "words"], default="shapes", help="words: for sd3 alone")
    start.add_argument("--seed", type=int, default=0)
    start.add_argument("--vae", help="take the autoencoder of this pipeline folder instead of training one (minutes)")
    start.add_argument("--vae-steps", type=int, default=2500)
    given = parser.parse_args(arguments)
    if given.verb == "start" and given.kind == "unet" and given.task == "words":
        parser.error("--task words needs --kind sd3: there is no UNet for the words")

    if given.verb == "prompts":
        print(*shapes.write_prompts(given.folder), *words.write_prompts(given.folder), sep="\n")
        return 0
    from diffusers import AutoencoderKL

    from lit_vgrpo.tiny.build import build_sd3, build_unet
    from lit_vgrpo.tiny.vae import train_vae

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if given.vae is not None:
        vae = AutoencoderKL.from_pretrained(given.vae, subfolder="vae")
    else:
        pictures = (shapes if given.task == "shapes" else words).random_pictures
        vae = train_vae(given.seed, given.vae_steps, pictures=pictures)
    if given.kind == "sd3":
        print(build_sd3(given.folder, given.seed, vae, task=given.task))
    else:
        print(build_unet(given.folder, given.seed, vae))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
