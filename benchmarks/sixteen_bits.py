"""How far 16 bits move a picture: the learned policy's and its pipeline's own, each against float32, in grey levels.

    python benchmarks/sixteen_bits.py                                  # every small random pipeline of tests/zoo.py
    python benchmarks/sixteen_bits.py --dtype float16 FluxPipeline ChromaPipeline

The policy keeps the latents, the solver and the VAE in float32; the pipeline has all its parts in 16 bits, as
``from_pretrained(..., torch_dtype=...)`` loads them. Prints means over the pixels, and their ratio, in Markdown.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

from lit_vgrpo.errors import one_line

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / folder) for folder in ("tests", "tests/policies", "tests/support", "tools")]

import zoo  # noqa: E402
from test_auto import LEARNABLE, built, drawn_by, drawn_by_policy  # noqa: E402

STEPS, GUIDANCE = 6, 3.0


@torch.no_grad()
def row(name: str, dtype: str) -> str:
    """Return the table's row of a pipeline."""
    wide = built(name).load()
    guidance = GUIDANCE if wide.guidance_error() is None else 1.0
    start = drawn_by(wide.pipeline, wide, guidance, STEPS)[1]
    exact = drawn_by_policy(wide, start, guidance, STEPS)
    try:
        narrow = built(name, dtype=dtype).load()
        ours = 255 * (drawn_by_policy(narrow, start, guidance, STEPS) - exact).abs().mean().item()
        pipeline = zoo.build(name)
        for part in pipeline.components.values():
            if isinstance(part, nn.Module):
                part.to(getattr(torch, dtype))
        theirs = 255 * (drawn_by(pipeline, wide, guidance, STEPS)[0].reshape(exact.shape) - exact).abs().mean().item()
    except Exception as error:  # a refusal of the policy's; and the pipeline's code may raise anything
        return f"| `{name}` | {one_line(error)[:80]} | | |"
    return f"| `{name}` | {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=LEARNABLE)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(f"| pipeline | policy in {options.dtype} | pipeline | ratio |\n|---|--:|--:|--:|")
    for name in options.names:
        print(row(name, options.dtype), flush=True)


if __name__ == "__main__":
    main()
