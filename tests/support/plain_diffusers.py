"""Run as a script: draws with exported weights, using diffusers alone. ``python plain_diffusers.py JOBS.json``."""

import json
import sys
from pathlib import Path

import bitsandbytes
import torch
from diffusers.quantizers.bitsandbytes import BnB4BitDiffusersQuantizer

# diffusers quantises only with a GPU, and bitsandbytes' kernel for AVX-512 takes no rows of fewer than 64 weights.
bitsandbytes.nn.modules.has_avx512bf16 = lambda: False
BnB4BitDiffusersQuantizer.validate_environment = lambda self, *args, **kwargs: None
BnB4BitDiffusersQuantizer.update_device_map = lambda self, device_map: {"": "cpu"}


def main(path):
    for job in json.loads(Path(path).read_text()):
        scope = torch.load(job["given"], weights_only=False)
        *lines, call = job["lines"]  # the very lines that the command printed, with our prompt and seed
        call = call.replace('prompt="a prompt"', 'prompt=prompt, generator=generator, output_type="pt"')
        scope["generator"] = torch.Generator().manual_seed(job["seed"])
        exec("\n".join([*lines, "pipe.set_progress_bar_config(disable=True)", call]), scope)
        torch.save(scope["frames" if "frames" in scope else "image"].float(), job["image"])
    # What was exported needs nothing of ours.
    assert not [name for name in sys.modules if name.startswith("lit_vgrpo")]


if __name__ == "__main__":
    main(sys.argv[1])
