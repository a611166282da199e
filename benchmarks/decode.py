"""What each switch of the VAE does to decoded images, in grey levels, and the milliseconds per image.

    python benchmarks/decode.py                            # small random and shipped pipelines, on the CPU
    python benchmarks/decode.py --sizes published --device cuda --side 512 --images 24 --repeats 3
    python benchmarks/decode.py sd3 wan --switches compiled

The images are decoded from noise. Each switch is compared with float32, in the memory format and the batches that the
policy uses by default. "levels" is the largest difference of a pixel, and the mean over pixels. ``--sizes published``
gives the VAEs their published sizes, with random weights. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lit_vgrpo.policies as families
from lit_vgrpo.policies import Policy

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "tools"), str(HERE.parent / "tests" / "support")]

import tiny_large_models as large  # noqa: E402
import tiny_pipelines as tiny  # noqa: E402
from gpu import REAL_SIZES  # noqa: E402

SHORT = {"max_sequence_length": 16}
SMALL: dict[str, tuple[str, Callable[[str], Any], dict[str, Any]]] = {
    "sd3": ("SD3Policy", lambda folder: tiny.build_sd3(folder, small=True), {"max_sequence_length": 4}),
    "sd15": ("UNetPolicy", lambda folder: tiny.build_unet(folder, small=True), {}),
    "sdxl": ("SDXLPolicy", lambda folder: tiny.build_sdxl(folder, small=True), {}),
    "flux": ("FluxPolicy", lambda folder: tiny.build_flux(folder, small=True), SHORT),
    "flux2": ("Flux2Policy", large.build_flux2, {"max_sequence_length": 48}),
    "qwen_image": ("QwenImagePolicy", large.build_qwen_image, {"max_sequence_length": 48}),
    "qwen_image21": ("QwenImage21Policy", large.build_qwen_image21, {"max_sequence_length": 48}),
    "z_image": ("ZImagePolicy", large.build_z_image, {"max_sequence_length": 48}),
    "sana": ("SanaPolicy", large.build_sana, SHORT),
    "wan": ("WanPolicy", large.build_wan, {**SHORT, "num_frames": 5}),
    "tiny_sd3": ("SD3Policy", lambda folder: "shipped:assets/tiny_sd3", {"max_sequence_length": 1}),
    "tiny_unet": ("UNetPolicy", lambda folder: "shipped:assets/tiny_unet", {}),
}
"""A family's class, what builds a small pipeline of it in a folder, and its options; the last two are trained."""
PUBLISHED = {
    "sd3": "sd3_pickscore",
    "sdxl": "sdxl_preference",
    "qwen_image": "qwen_image_pickscore",
    "wan": "wan_pickscore",
}
"""The recipe with the published sizes of a family's VAE."""


def in_format(policy: Policy, four: torch.memory_format, five: torch.memory_format) -> None:
    for weight in policy.pipeline.vae.parameters():
        if weight.ndim > 3:
            weight.data = weight.data.contiguous(memory_format=four if weight.ndim == 4 else five)


def is_3d(policy: Policy) -> bool:
    return any(weight.ndim == 5 for weight in policy.pipeline.vae.parameters())


SWITCHES: dict[str, Callable[[Policy], None]] = {
    "float16": lambda policy: setattr(policy, "decode_dtype", torch.float16),
    "bfloat16": lambda policy: setattr(policy, "decode_dtype", torch.bfloat16),
    "contiguous": lambda policy: in_format(policy, torch.contiguous_format, torch.contiguous_format),
    "channels last": lambda policy: in_format(policy, torch.channels_last, torch.channels_last_3d),
    "batches of 24": lambda policy: setattr(policy, "decode_batch_size", 24),
    "compiled": lambda policy: policy.pipeline.vae.decoder.compile(),
    "float16, compiled": lambda policy: (SWITCHES["float16"](policy), SWITCHES["compiled"](policy))[0],
}


def measure(policy: Policy, latents: Tensor, switches: list[str], repeats: int) -> Iterator[dict[str, Any]]:
    """Yield a row for float32 and for each switch alone; the policy is afterwards as before."""
    vae, dtype, batch = policy.pipeline.vae, policy.decode_dtype, policy.decode_batch_size
    exact, base = None, 0.0
    for name in ("float32", *switches):
        policy.pipeline.vae, policy.decode_dtype, policy.decode_batch_size = copy.deepcopy(vae), torch.float32, batch
        if name in SWITCHES:
            SWITCHES[name](policy)
        try:
            first = seconds_of(policy, latents)[0]
            best = min(seconds_of(policy, latents)[0] for _ in range(repeats))
            images = seconds_of(policy, latents)[1]
        finally:
            policy.pipeline.vae, policy.decode_dtype, policy.decode_batch_size = vae, dtype, batch
        exact, base = (images, best) if exact is None else (exact, base)
        levels = 255 * (images - exact).abs()
        found = {"switch": name, "levels_most": float(levels.max()), "levels_mean": float(levels.mean())}
        yield {**found, "ms": 1e3 * best / len(latents), "times": base / best, "first_s": first}


def seconds_of(policy: Policy, latents: Tensor) -> tuple[float, Tensor]:
    wait = torch.cuda.synchronize if latents.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    images = policy.decode(latents)
    wait()
    return time.perf_counter() - start, images


def build(name: str, folder: str, sizes: str, device: str) -> Policy:
    kind, builder, options = SMALL[name]
    policy: Policy = getattr(families, kind)(str(builder(folder)), height=32, width=32, **options).load()
    if sizes == "published":
        vae = policy.pipeline.vae
        with torch.device(device):
            vae = type(vae).from_config({**vae.config, **REAL_SIZES[PUBLISHED[name]]["vae"]})
        policy.pipeline.vae = vae.eval().requires_grad_(False)
        if not is_3d(policy):
            policy.pipeline.vae.to(memory_format=torch.channels_last)
    return policy.to(device)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(SMALL)}")
    parser.add_argument("--switches", default=",".join(list(SWITCHES)[:5]), help=f"of {', '.join(SWITCHES)}")
    parser.add_argument("--sizes", default="small", choices=["small", "published"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--side", type=int, default=64, help="of the images, in pixels")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=1, help="the fastest counts")
    args = parser.parse_args(words)
    torch.manual_seed(0)
    logging.disable(logging.WARNING)  # of absent text encoders
    print("| family | switch | levels, most | mean | ms per image | times as fast | first call, s |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for name in args.families or (SMALL if args.sizes == "small" else PUBLISHED):
        with tempfile.TemporaryDirectory() as folder:
            policy = build(name, folder, args.sizes, args.device)
        side = args.side // (8 if args.sizes == "published" else policy.pixels_per_latent)
        channels, *frames = policy.latent_shape[:-2]
        if args.sizes == "published":
            config = policy.pipeline.vae.config
            channels = config.get("latent_channels") or config["z_dim"]
        latents = torch.randn(args.images, channels, *frames, side, side).to(args.device)
        for row in measure(policy, latents, args.switches.split(","), args.repeats):
            numbers = [f"{row['levels_most']:.3f}", f"{row['levels_mean']:.4f}", f"{row['ms']:.3g}"]
            numbers += [f"{row['times']:.2f}", f"{row['first_s']:.2g}"]
            print(f"| {name} | {row['switch']} | {' | '.join(numbers)} |", flush=True)


if __name__ == "__main__":
    main()
