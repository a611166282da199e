#!/usr/bin/env bash
# diffusers: a step removed from a modular pipeline is back after saving and loading
#
# One would guess: FLUX.3's prompt upsampler, a 9B language model, can be left out for good, as its docstring shows:
# `blocks.sub_blocks.pop("prompt_upsampler")`, a pipeline of these blocks, save_pretrained, from_pretrained.
#
# What happens (diffusers 0.42.1, torch 2.13.0): modular_model_index.json stores the class of the blocks, not which steps
# it has, so the loaded pipeline has the step again, and its call ends with an AttributeError, since the step's model is
# None, or rewrites the prompts if it is loaded. Blocks composed with SequentialPipelineBlocks.from_blocks_dict are
# replaced by the default ones too: of SDXL's last three steps, saved without the text encoder, all five come back.
# And save_pretrained, whose hint is `str | os.PathLike`, fails with a Path.
#
# Why it matters: prompts are encoded as given in training, and rewritten in evaluation. Remove the step after each load.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0
cat > "$folder/check.py" <<'PY'
import logging
import sys
from pathlib import Path

import diffusers
import torch
from diffusers import Flux3AutoBlocks, ModularPipeline, SequentialPipelineBlocks

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
logging.getLogger("diffusers").setLevel(logging.CRITICAL)
folder = Path(sys.argv[1])
blocks = Flux3AutoBlocks()
blocks.sub_blocks.pop("prompt_upsampler")
pipeline = blocks.init_pipeline()
pipeline.save_pretrained(str(folder / "flux3"), overwrite_modular_index=True)
loaded = ModularPipeline.from_pretrained(str(folder / "flux3"))
print(f"saved:  {list(pipeline.blocks.sub_blocks)}\nloaded: {list(loaded.blocks.sub_blocks)}")
assert "prompt_upsampler" not in pipeline.blocks.sub_blocks
assert "prompt_upsampler" in loaded.blocks.sub_blocks, "changed: the removed step stays away"
try:
    loaded(prompt="a cat", height=64, width=64)
except AttributeError as error:
    print(f"its call: AttributeError: {error}")
else:
    raise AssertionError("changed: the loaded pipeline can be called without the step's model")

whole = diffusers.StableDiffusionXLAutoBlocks().sub_blocks
kept = {name: whole[name] for name in list(whole)[-3:]}
composed = SequentialPipelineBlocks.from_blocks_dict(kept)
pipeline = diffusers.StableDiffusionXLModularPipeline(blocks=composed)
pipeline.save_pretrained(str(folder / "sdxl"), overwrite_modular_index=True)
again = ModularPipeline.from_pretrained(str(folder / "sdxl"))
print(f"composed: {list(kept)}\nloaded:   {list(again.blocks.sub_blocks)}")
assert list(again.blocks.sub_blocks) == list(whole), "changed: composed blocks are loaded as they were saved"

try:
    pipeline.save_pretrained(folder / "path", overwrite_modular_index=True)
except AttributeError as error:
    print(f"save_pretrained(Path): AttributeError: {error}")
else:
    raise AssertionError("changed: save_pretrained takes a Path")
print("as described: remove the step after each load")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"
