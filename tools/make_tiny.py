"""Write the pipeline that a tiny recipe's pre-training starts from: a trained autoencoder and an untrained denoiser.

python tools/make_tiny.py tiny_sd3_start --kind sd3
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence

import torch
from diffusers import AutoencoderKL
from tiny_pipelines import build_sd3, build_unet
from tiny_vae import random_pictures, train_vae
from torch import Tensor

from lit_vgrpo.tiny import words


def random_words(count: int, generator: torch.Generator) -> Tensor:
    """Return images of random letters, shape ``(count, 3, 16, 40)`` in [0, 1]."""
    return torch.stack([words.render(words.random_letters(generator), generator) for _ in range(count)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the pipeline and print its folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="folder to write to")
    parser.add_argument("--kind", choices=["sd3", "unet"], default="sd3", help="pipeline family")
    parser.add_argument("--task", choices=["shapes", "words"], default="shapes", help="words needs --kind sd3")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random weights")
    parser.add_argument("--vae", help="pipeline folder whose autoencoder to reuse; trains one otherwise (minutes)")
    parser.add_argument("--vae-steps", type=int, default=2500, help="optimizer steps of the autoencoder's training")
    args = parser.parse_args(arguments)
    if args.kind == "unet" and args.task == "words":
        parser.error("--task words needs --kind sd3: there is no UNet for the words")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.vae is not None:
        vae = AutoencoderKL.from_pretrained(args.vae, subfolder="vae")
    else:
        pictures = random_pictures if args.task == "shapes" else random_words
        vae = train_vae(args.seed, args.vae_steps, pictures=pictures)
    if args.kind == "sd3":
        print(build_sd3(args.folder, args.seed, vae, task=args.task))
    else:
        print(build_unet(args.folder, args.seed, vae))


if __name__ == "__main__":
    main()
