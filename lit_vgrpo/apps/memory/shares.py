"""Memory that a rank always holds for weights, gradients and optimizer state, under each strategy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.trained import block_linears, quantised_bytes
from lit_vgrpo.training.optimizer import CustomOptimizer, OptimizerConfig
from lit_vgrpo.training.sharded import FSDP2, ZeRO, blocks_of

LIVE_PARAMETERS = 10**9
"""Elements that ZeRO-3 keeps gathered at once: DeepSpeed's ``stage3_max_live_parameters``."""


@dataclass(frozen=True)
class Shares:
    """Bytes on one rank.

    Attributes:
        parts: Memory held from the first update on, by name.
        trained: One copy of the trained weights.
        step: Additional memory of AdamW's step.
        movable: Frozen weights that can wait in CPU memory, which sharded ones cannot.
    """

    parts: dict[str, int]
    trained: int
    step: int
    movable: int


def shares(
    policy: Policy, optimizer: OptimizerConfig | CustomOptimizer, strategy: Strategy, world_size: int, on_gpu: bool
) -> Shares:
    """Return the memory of the network and optimizer on one rank.

    Args:
        policy: A loaded policy, on any device.
        on_gpu: True if the rank uses a GPU, where AdamW steps all weights at once and offloading frees memory.
    """
    trained = list(trainable_parameters(policy).values())
    frozen = [p for p in policy.network.parameters() if not p.requires_grad]
    size, rest, state = bytes_of(trained), bytes_of(frozen), optimizer.state_bytes(trained)
    moments = f"{optimizer.name}'s moments"
    rest -= saved_by_quantisation(policy)
    buffers = bytes_of(policy.network.buffers())  # which no strategy shards
    is_zero, is_fsdp = isinstance(strategy, ZeRO), isinstance(strategy, FSDP2)
    stage = strategy.stage if isinstance(strategy, ZeRO) else 0
    sharded = is_fsdp or stage == 3
    size_of_shards = strategy.shard_size or world_size if isinstance(strategy, FSDP2) else world_size
    weight_shards = size_of_shards if sharded else 1
    gradient_shards = size_of_shards if sharded or stage == 2 else 1
    state_shards = size_of_shards if sharded or is_zero else 1
    parts = {
        "trained weights": size // weight_shards,
        "frozen weights": rest // weight_shards + buffers,
        "gradients": size // gradient_shards,
        moments: state // state_shards,
    }
    if isinstance(strategy, ZeRO):
        parts["ZeRO's copy of the trained weights"] = size // world_size
        # The reduction bucket, allocated whole even for few gradients; gathering is done in place.
        parts["ZeRO's bucket"] = 4 * strategy.config["zero_optimization"]["reduce_bucket_size"]  # type: ignore[index]
        if strategy.offload and on_gpu:
            parts |= dict.fromkeys((moments, "ZeRO's copy of the trained weights", "gradients"), 0)
            if stage == 3:
                parts |= {"trained weights": 0, "frozen weights": buffers}
    elif world_size > 1 and not is_fsdp:
        parts["DDP's buckets"] = size
    if sharded and world_size > 1:
        parts["weights gathered for a pass"] = _gathered(policy.network, stage)
    steps_here = on_gpu and not (isinstance(strategy, ZeRO) and strategy.offload)
    step = size // state_shards if steps_here and optimizer.kind != "adamw8bit" else 0
    return Shares(parts, size // weight_shards, step, 0 if sharded else parts["frozen weights"])


def saved_by_quantisation(policy: Policy) -> int:
    """Return the bytes that a quantised base saves over the weights of a policy on the meta device."""
    if policy.quantisation is None:
        return 0
    weights = [layer.weight for layer in block_linears(policy.network).values()]
    return sum(bytes_of([one]) - quantised_bytes(policy.quantisation, one.numel()) for one in weights)


def restored_at_once(policy: Policy) -> int:
    """Return the bytes of the largest quantised weight, which a pass restores one at a time."""
    if policy.quantisation is None:
        return 0
    return max((bytes_of([layer.weight]) for layer in block_linears(policy.network).values()), default=0)


def _gathered(network: nn.Module, stage: int) -> int:
    whole = bytes_of(network.parameters())
    if stage == 3:
        return min(whole, whole * LIVE_PARAMETERS // max(1, sum(p.numel() for p in network.parameters())))
    blocks = [bytes_of(block.parameters()) for block in blocks_of(network)]
    # The current block, the prefetched one, and everything outside blocks.
    return whole - sum(blocks) + 2 * max(blocks, default=0)


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Return a module's parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the total bytes of unsharded tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
