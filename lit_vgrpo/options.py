"""Options of the commands, each written once: name, type, default and help. Nothing slow is imported here.

A class is a command, with its help as the docstring. A field is an option, of the same name unless its ``Option`` has
another; ``words`` are the arguments, and ``line`` is the command as typed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from lit_vgrpo.errors import UserError

HUB_PREFIX = "hub:"


def _read_path(text: str) -> Path:
    return Path(text).expanduser()


def _existing(text: str) -> str:
    if not os.path.exists(os.path.expanduser(text)):
        raise UserError(f"{text} does not exist. Give a folder of images, or an image file.")
    return text


def gpu_memory_of(text: str) -> int:
    """Return the bytes of a GPU size as sold, a number of GiB with or without a unit; raise UserError if it is invalid.

    >>> gpu_memory_of("80GB") == gpu_memory_of("80") == 80 * 2**30
    True
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:gi?b?)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise UserError(f"{text} is not a GPU size. Write it as 80GiB.")
    if (size := round(float(match[1]) * 2**30)) <= SMALLEST_RESERVE:
        raise UserError(f"{text} leaves nothing: {SMALLEST_RESERVE / 2**30:.2f} GiB is reserved for CUDA. Give more.")
    return size


def _read_token(variable: str) -> str:
    token = os.environ.get(variable, "").strip()
    if not token:
        raise UserError(f"{variable} is not set in the environment. Run: export {variable}=...")
    return token


SMALLEST_RESERVE = 2**30
"""Bytes of a GPU that are left to CUDA at least."""
Task = Literal["image", "edit", "video", "distillation", "pretraining"]
Resume = Annotated[bool, Option("--resume", help="Continue in the run folder.")]
Host = Annotated[str, Option(help="Address to listen on.")]
Port = Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")]
Token = Annotated[
    str | None, Option("--token-env", parser=_read_token, metavar="NAME", help="Environment variable with a secret.")
]
OUT = Option(parser=_read_path, metavar="PATH", help="File or folder to write.")
Out = Annotated[Path | None, OUT]
COMPARED = "vgrpo, flowgrpo, mixgrpo, nft, dgpo"
"""The methods that ``lightning compare`` compares by default."""
LATER: Any = None
"""Default that is known only where the command runs."""


@dataclass(kw_only=True)
class Check:
    """Find the errors of a recipe without training, or show what more GPUs would do."""

    words: list[str]
    memory: Annotated[
        int | None, Option(parser=gpu_memory_of, metavar="SIZE", help="GPU to compare with, such as 80GiB.")
    ] = None
    scale: Annotated[str | None, Option(help="Show it on these numbers of GPUs instead, such as 1,8,64,512.")] = None
    bandwidth: Annotated[str, Option(help="With --scale: GB/s of a GPU in its machine, and of a machine.")] = "360,40"
    seconds_per_image: Annotated[str | None, Option(help="With --scale: of sampling and of training, as 0.5,0.2.")] = (
        None
    )
    reward_rate: Annotated[
        float | None, Option(min=1e-6, help="With --scale: images per second of the slowest reward on servers or CPUs.")
    ] = None


@dataclass(kw_only=True)
class Compare:
    """Race training methods on one task, or continue a race."""

    words: list[str]
    line: str
    named: Annotated[
        str | None, Option("--methods", help=f"Shipped overlays or files, separated by commas; by default {COMPARED}.")
    ] = None
    num_seeds: Annotated[int, Option("--seeds", min=1, help="Seeds per method; 3 by default, 1 in a sweep.")] = LATER
    target: Annotated[str | None, Option(help="Target held-out rewards, such as 0.6,0.7.")] = None
    base_method: Annotated[str, Option("--base", help="Baseline method for relative costs.")] = LATER
    kinds: Annotated[str | None, Option("--settings", help="published, tuned or both, separated by a comma.")] = None
    iterations: Annotated[int, Option(min=1, help="Iterations per run; by default the recipe's.")] = LATER
    evaluate_every: Annotated[int, Option(min=1, help="Iterations between evaluations.")] = 5
    jobs: Annotated[int, Option(min=1, help="Number of parallel runs.")] = LATER
    out: Annotated[Path, OUT] = LATER
    sweep: Annotated[bool, Option("--sweep", help="Search for each method's best settings instead.")] = False


@dataclass(kw_only=True)
class Vote:
    """Show the page on which people choose the best images.

    To train on their votes, with another reward for the held-out images, which nobody votes on:

    lightning vote tiny_shapes model.reward=VoteReward model.untrained_reward=ShapesReward

    For a run that lightning run trains, in another terminal:

    lightning vote runs/tiny_shapes
    """

    words: list[str]
    resume: Resume = False
    host: Host = "127.0.0.1"
    port: Port = 8009
    token: Token = None


@dataclass(kw_only=True)
class Report:
    """Write runs as one HTML page."""

    words: list[str]
    out: Out = None
    serve: Annotated[bool, Option("--serve", help="Serve the page while the runs train; write no file.")] = False
    port: Port = 8008


@dataclass(kw_only=True)
class SavedRun:
    """Options of the commands that read a run's weights."""

    words: list[str]
    no_ema: Annotated[bool, Option("--no-ema", help="Use the trained weights themselves, not their average.")] = False
    named: Annotated[str | None, Option("--checkpoint", help="Checkpoint; by default the last good one.")] = None


@dataclass(kw_only=True)
class Evaluate(SavedRun):
    """Score a run's weights on its held-out prompts, or runs and models on a benchmark."""

    benchmark: Annotated[str | None, Option(metavar="NAME", help="Use a published protocol, such as geneval.")] = None
    prompts: Annotated[str | None, Option(metavar="PATH", help="Local copy of the benchmark's prompts.")] = None
    pictures: Annotated[str | None, Option(metavar="DIR", help="Pictures that the benchmark edits.")] = None
    share: Annotated[str | None, Option(metavar="I/N", help="Score the I-th of N shares of its images.")] = None
    reference: Annotated[bool, Option("--reference", help="Evaluate the reference too.")] = False
    fid_reference: Annotated[str | None, Option(help="Real images, or a file of their statistics.")] = None
    features: Annotated[str | None, Option(help="Feature network of FID and diversity.")] = None
    out: Annotated[Path, OUT] = LATER


@dataclass(kw_only=True)
class Sample(SavedRun):
    """Generate images with a run's weights."""

    prompt: Annotated[list[str] | None, Option(help="Prompt; may be repeated.")] = None
    prompts: Annotated[str | None, Option(help="File of prompts.")] = None
    image: Annotated[list[Path] | None, Option(parser=_read_path, metavar="FILE", help="Pictures to edit.")] = None
    seed: Annotated[int, Option(min=0, help="Seed of the first image of each prompt.")] = 0
    count: Annotated[int, Option(min=1, help="Images per prompt, each with the next seed.")] = 1
    reference: Annotated[bool, Option("--reference", help="Use the reference's weights.")] = False
    steps: Annotated[int | None, Option(min=1, max=1000, help="Sampling steps; by default the recipe's.")] = None
    guidance: Annotated[float | None, Option(min=1, max=1000, help="Guidance scale; 1 disables it.")] = None
    format: Annotated[Literal["webp", "mp4"], Option(help="File format of videos.")] = "webp"
    out: Out = None


@dataclass(kw_only=True)
class Score:
    """Score image files with a reward."""

    words: list[str]
    prompt: Annotated[str | None, Option(help="Prompt for all images.")] = None
    prompts: Annotated[str | None, Option(help="File with one prompt per image.")] = None
    out: Out = None
    batch_size: Annotated[int, Option(min=1, help="Images per call of the reward.")] = 1


@dataclass(kw_only=True)
class CheckReward:
    """Try a recipe's rewards on a few images."""

    words: list[str]
    images: Annotated[
        str | None,
        Option(parser=_existing, metavar="PATH", help="Images to score; by default sampled from the policy."),
    ] = None
    num_prompts: Annotated[int, Option(min=1, help="Number of training prompts to use.")] = 4
    images_per_prompt: Annotated[int, Option(min=1, help="Images per prompt.")] = 2
    out: Annotated[Path, Option(parser=_read_path, metavar="PATH", help="Picture of the scores to write.")] = Path(
        "check_reward.png"
    )


@dataclass(kw_only=True)
class Export(SavedRun):
    """Write a run's weights for diffusers, or publish them."""

    to: Annotated[str, Option(help="New or empty folder, or hub:OWNER/NAME.")]
    format: Annotated[Literal["diffusers", "kohya", "comfyui"], Option(help="File format of a LoRA.")] = "diffusers"
    merge: Annotated[bool, Option("--merge", help="Merge the LoRA into the base weights.")] = False
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], Option(help="Dtype of the files.")] = "float32"
    public: Annotated[bool, Option("--public", help="With hub:, create a public repository.")] = False
    yes: Annotated[bool, Option("--yes", help="With hub:, upload without asking.")] = False


@dataclass(kw_only=True)
class ServeReward:
    """Score images over HTTP for other machines."""

    words: list[str]
    host: Host = "127.0.0.1"
    port: Port = 8000
    token: Token = None
    device: Annotated[str | None, Option(help="cpu or cuda:0; by default a GPU if there is one.")] = None
    batch_size: Annotated[int, Option(min=1, help="Images per call of the reward, or 16 megapixels.")] = 32
    max_request_mb: Annotated[int, Option(min=1, help="Maximum size of a request in MB.")] = 64
    max_images: Annotated[int, Option(min=1, help="Maximum images per request.")] = 256
    max_megapixels: Annotated[int, Option(min=1, max=85, help="Maximum size of an image in megapixels.")] = 4
    print_setup: Annotated[bool, Option("--print-setup", help="Print the commands that install a judge.")] = False
