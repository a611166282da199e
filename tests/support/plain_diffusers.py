"""Run as a script: draws with exported weights, using diffusers alone. ``python plain_diffusers.py JOBS.json``."""

import json
import sys
from pathlib import Path

import torch
from PIL import Image


def main(path):
    for job in json.loads(Path(path).read_text()):
        scope = {"picture": Image.new("RGB", (64, 64))}
        exec("\n".join(job["lines"]), scope)  # the very lines that the command printed
        pipe = scope["pipe"]
        pipe.set_progress_bar_config(disable=True)
        if job["scheduler"]:
            scheduler = getattr(scope["diffusers"], job["scheduler"].pop("class"))
            pipe.scheduler = scheduler.from_config(pipe.scheduler.config, **job["scheduler"])
        torch.save(pipe(**torch.load(job["call"], weights_only=False))[0][0], job["image"])
    # What was exported needs nothing of ours.
    assert not [name for name in sys.modules if name.startswith("lit_vgrpo")]


if __name__ == "__main__":
    main(sys.argv[1])
