"""FSDP2, torch's fully sharded data parallelism, as a Lightning strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lit_vgrpo.core.sharding import full, is_sharded, laid_out_as
from lit_vgrpo.training.checkpoint_file import PortableCheckpoints


class FSDP2(PortableCheckpoints, ModelParallelStrategy):
    """Fully sharded data parallelism over all processes; see :func:`shard`."""

    def __init__(self) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        # Not in configure_model: whole checkpoint weights are loaded between the two.
        network: Any = self.lightning_module.policy.network  # type: ignore[union-attr]
        if not any(is_sharded(p) for p in network.parameters()):
            shard(network, self.device_mesh["data_parallel"])
        super().setup(trainer)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's own ``state_dict``, whole on rank 0; all ranks must call it."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        saved = optimizer.state_dict()
        state = {
            index: {key: full(v, v.to_local()) if isinstance(v, DTensor) else v for key, v in values.items()}
            for index, values in saved["state"].items()
        }
        return {**saved, "state": state}

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        saved = checkpoint["optimizer_states"][0]
        state = {}
        for index, parameter in enumerate(self._trained.values()):
            if index in saved["state"]:
                values = saved["state"][index]
                assert isinstance(parameter, DTensor)
                state[index] = {k: laid_out_as(parameter, v) if v.ndim else v for k, v in values.items()}
        self.optimizers[0].load_state_dict({**saved, "state": state})


def shard(network: nn.Module, mesh: Any) -> None:
    """Shard a diffusers network over a mesh, block by block, with ``fully_shard``.

    Every module, the root included, reshards after each forward pass: a rollout runs many forward passes without a
    backward pass, and copies of the weights may be swapped in between.
    """
    from torch.distributed.fsdp import fully_shard

    for module in [*blocks_of(network), network]:
        fully_shard(module, mesh=mesh, reshard_after_forward=True)


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """Return the innermost modules of the classes that diffusers does not split over devices.

    In a UNet such classes are nested: a single up block has nearly half of SDXL's weights, which would all be gathered
    at once.
    """
    names = frozenset(getattr(network, "_no_split_modules", None) or ())

    def innermost(module: nn.Module) -> list[nn.Module]:
        found = []
        for child in module.children():
            found += innermost(child) or ([child] if type(child).__name__ in names else [])
        return found

    return innermost(network)
