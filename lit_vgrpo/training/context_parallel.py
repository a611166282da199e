"""Context parallelism: processes share the tokens of their images, following diffusers' plan for the network.

Private names are those of diffusers 0.42.1.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

from torch.distributed.device_mesh import init_device_mesh

from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.loading import bare_network
from lit_vgrpo.system.hub import quiet_libraries

OPTION = "trainer.strategy.context_parallel"


def context_errors(policy: Policy, degree: int, sides: tuple[int | None, int | None] = (None, None)) -> list[str]:
    """Return at most one line on why ``degree`` processes cannot share an image's tokens.

    Before the policy is loaded, its configuration is read if it is on this machine; image tokens are not checked.
    ``sides`` are height and width of held-out images, ``None`` for the policy's.
    """
    network: Any = None if degree == 1 else policy.network if policy.loaded else bare_network(policy)
    if network is None:
        return []
    option = f"{OPTION}={degree}"
    if network._cp_plan is None:
        name = type(network).__name__
        known = "FLUX, FLUX.2, Qwen-Image and Wan"
        return [f"{option}: diffusers cannot split the tokens of {name}, only those of {known}."]
    heads, length = network.config.num_attention_heads, policy.max_sequence_length
    larger = f"Set model.policy.max_sequence_length={-(-length // degree) * degree}."
    divided = [(heads, f"attention heads of {policy.checkpoint}. Use a divisor of it.")]
    divided.append((length, f"tokens of a prompt. {larger}"))
    for size in (nullcontext(), policy.sized(*sides)) if policy.loaded else ():
        with size:
            advice = f"Set another {policy.size_in}.height or width."
            divided.append((policy.image_tokens(), f"tokens of an image. {advice}"))
    return [f"{option} does not divide the {number} {what}" for number, what in divided if number % degree][:1]


def share_tokens(network: Any, degree: int, processes: int, device: str) -> None:
    """Split every image's tokens over each ``degree`` consecutive processes (Ulysses, arXiv 2309.14509).

    Attention is over all tokens, with a part of the heads in each process. The output is gathered. In the backward pass
    each process keeps the gradient of its part of the output, so the gradients sum to the full gradient.
    """
    from diffusers import ContextParallelConfig

    mesh = init_device_mesh(device, (processes // degree, 1, degree), mesh_dim_names=("rank", "ring", "ulysses"))
    # diffusers takes the rank modulo the number of accelerators, which is 0 on a CPU.
    one = patch("torch.accelerator.device_count", return_value=1) if device == "cpu" else nullcontext()
    with quiet_libraries(), one:
        network.enable_parallelism(config=ContextParallelConfig(ulysses_degree=degree, mesh=mesh))
