"""Run as a script: draws with exported weights, using diffusers alone. ``python plain_diffusers.py JOBS.json``."""

import json
import sys
from pathlib import Path

import torch


def main(path):
    for job in json.loads(Path(path).read_text()):
        scope = torch.load(job["given"], weights_only=False)
        *lines, call = job["lines"]  # the very lines that the command printed, with our prompt and noise
        call = call.replace('prompt="a prompt"', 'prompt=prompt, latents=latents, output_type="pt"')
        exec("\n".join([*lines, "pipe.set_progress_bar_config(disable=True)", call]), scope)
        torch.save(scope["frames" if "frames" in scope else "image"], job["image"])
    # What was exported needs nothing of ours.
    assert not [name for name in sys.modules if name.startswith("lit_vgrpo")]


if __name__ == "__main__":
    main(sys.argv[1])
