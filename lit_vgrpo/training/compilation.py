"""``model.policy.compile: auto``: compile the network where a run is long enough to gain from it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from lit_vgrpo.core.gather import image_ranks
from lit_vgrpo.core.sharding import is_sharded
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.errors import one_line, say
from lit_vgrpo.policies.acceleration import compile_network, repeated_blocks
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.training.evaluation import TrainingModule
from lit_vgrpo.training.trainer_internals import declared

FEWEST_PASSES = 10_000
"""Images through the network, per rank, from which compilation pays: on an H100 at 512 pixels the compiler's time was
that of 12,000 saved on SD 3.5 medium, and of 1,400 on FLUX.1-dev."""
ROWS = 2
"""Images of the passes that compile: the fewest for which torch does not write special code."""


def compile_if_it_pays(module: TrainingModule) -> None:
    """Compile the network under ``compile: auto`` and report it; if the compiler fails, continue without it."""
    policy, trainer = module.policy, declared(module.trainer)
    if policy.compile_network != "auto" or not can_compile(policy) or passes_of(module) < FEWEST_PASSES:
        return
    if trainer.is_global_zero:
        say("compile: auto compiles the network. On an H100 that took about a minute, and passes then half the time.")
    start, counts = time.perf_counter(), module.ledger.state_dict()
    prompt = next(iter(trainer.datamodule.training_rows()))["prompt"]
    try:
        compile_for_run(policy, prompt, exact=module.objective.compares_passes(trainer.datamodule.sizes))
        line = f"compile: auto took {time.perf_counter() - start:.0f} s."
    except Exception as error:  # what fails without a compiler too fails again in the first rollout
        for block in repeated_blocks(policy.network):
            block._compiled_call_impl = None
        line = f"compile: auto failed ({type(error).__name__}: {one_line(error)[:200]}). The run continues without it."
    module.ledger.load_state_dict(counts)
    if trainer.is_global_zero:
        say(line)


def can_compile(policy: Policy) -> bool:
    """Return whether a policy has blocks that compile, in 16 bits on a GPU, where the gain was measured."""
    is_whole = policy.quantisation is None and not any(map(is_sharded, policy.network.parameters()))
    is_fast = policy.device.type == "cuda" and policy.dtype != torch.float32
    return is_fast and is_whole and bool(repeated_blocks(policy.network))


def passes_of(module: TrainingModule) -> float:
    """Return the images that pass through the network on a rank in the whole run, without evaluations."""
    trainer = declared(module.trainer)
    sizes, steps = trainer.datamodule.sizes, trainer.max_steps
    limits = (trainer.max_epochs, steps / sizes.updates_per_iteration)
    iterations = min((limit for limit in limits if limit is not None and limit >= 0), default=math.inf)
    images = sizes.plan(image_ranks(trainer)[1]).images_per_rank
    return images * iterations * sum(module.objective.passes_per_image(sizes, module.policy).values())


def compile_for_run(policy: Policy, prompt: str, exact: bool, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile a policy's network, with and without gradient, for any batch size.

    Args:
        prompt: A prompt of the run.
        exact: See :func:`~lit_vgrpo.policies.acceleration.compile_network`, also for ``backend``.
    """
    compile_network(policy.network, backend, exact, ROWS)
    cond = policy.encode([prompt], policy.blank_references(1)).select(torch.zeros(ROWS, dtype=torch.int64))
    z = torch.zeros(ROWS, *policy.latent_shape, device=policy.device)
    t = policy.path.snap(torch.full((ROWS,), 0.5)).to(policy.device)
    with torch.no_grad():
        policy(z, t, cond)
    prediction = policy(z, t, cond)
    # not backward(), which triggers the strategy's hooks
    torch.autograd.grad(prediction.sum(), [*trainable_parameters(policy).values()], allow_unused=True)
