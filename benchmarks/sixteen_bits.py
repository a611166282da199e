"""How far 16 bits move a picture: the learned policy's and its pipeline's own, each against float32, in grey levels.

    python benchmarks/sixteen_bits.py                                  # every small random pipeline of tests/zoo.py
    python benchmarks/sixteen_bits.py --dtype float16 FluxPipeline ChromaPipeline

The policy keeps the latents, the solver and the VAE in float32; the pipeline has all its parts in 16 bits, as
``from_pretrained(..., torch_dtype=...)`` loads them. Prints means over the pixels, and their ratio, in Markdown.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import sys
import warnings
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_vgrpo.core.sampling import sample
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.errors import one_line
from lit_vgrpo.policies import AutoPolicy

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / folder) for folder in ("tests", "tests/policies", "tests/support", "tools")]

import zoo  # noqa: E402
from test_auto import LEARNABLE, PROMPT, built  # noqa: E402

STEPS, GUIDANCE = 6, 3.0


def of_pipeline(policy: AutoPolicy, pipeline: Any, guidance: float) -> tuple[Tensor, Tensor]:
    """Return the picture that a pipeline draws, and the scheduler's first latents."""
    scheduler, states = policy._new_scheduler(), []
    step = scheduler.step

    @wraps(step)
    def watched(*given: Any, **named: Any) -> Any:
        states.append(inspect.signature(step).bind(*given, **named).arguments["sample"].clone())
        return step(*given, **named)

    scheduler.step = watched
    given = {"num_inference_steps": STEPS, "generator": torch.Generator().manual_seed(1), "output_type": "pt"}
    given |= {**policy.pipeline_options, **policy.pipeline_guidance(guidance, 1)}
    given |= policy.pipeline_references(torch.zeros(1, 3, *policy.image_size)) if policy.edits else {}
    for name, part in {"scheduler": scheduler, **policy.pipeline_parts(guidance)}.items():
        setattr(pipeline, name, part)
    picture = pipeline(prompt=PROMPT, **{key: given[key] for key in given if key in policy.watcher.parameters})[0]
    return (picture if isinstance(picture, Tensor) else torch.stack(list(picture))).float(), states[0]


def of_policy(policy: AutoPolicy, noise: Tensor, guidance: float) -> Tensor:
    """Return the picture that a policy draws."""
    cond = policy.encode([PROMPT], policy.blank_references(1))
    spec = RolloutSpec(policy.solvers[0], STEPS, guidance)
    return policy.decode(sample(policy, cond, torch.zeros(1, dtype=torch.long), spec, noise)[0]).float()


@torch.no_grad()
def row(name: str, dtype: str) -> str:
    """Return the table's row of a pipeline."""
    wide, narrow = built(name).load(), built(name, dtype=dtype).load()
    guidance = GUIDANCE if wide.guidance_error() is None else 1.0
    noise = wide._latents_of(of_pipeline(wide, wide.pipeline, guidance)[1])
    exact = of_policy(wide, noise, guidance)
    pipeline = zoo.build(name)
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            part.to(getattr(torch, dtype))
    ours = 255 * (of_policy(narrow, noise, guidance) - exact).abs().mean().item()
    try:
        theirs = 255 * (of_pipeline(wide, pipeline, guidance)[0].reshape(exact.shape) - exact).abs().mean().item()
    except Exception as error:  # the pipeline's code may raise anything
        return f"| `{name}` | {ours:.2f} | {one_line(error)[:60]} | |"
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
