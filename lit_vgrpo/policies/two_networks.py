"""Two networks of one pipeline as one, each for its range of times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_vgrpo.core.gather import rank_and_world_size


class TwoNetworks(nn.Module):
    """The two networks of Wan 2.2 A14B as one, which passes each row to the network for its time.

    Args:
        transformer: Network for the times at or above the boundary.
        transformer_2: Network for the times below it.
        boundary: The boundary, in timesteps.
    """

    def __init__(self, transformer: Any, transformer_2: Any, boundary: float) -> None:
        super().__init__()
        self.transformer, self.transformer_2, self.boundary = transformer, transformer_2, boundary
        self.rows_share_time = False
        self.config, self._cp_plan = transformer.config, transformer._cp_plan
        self._no_split_modules = transformer._no_split_modules

    def forward(self, z: Tensor, timestep: Tensor, inputs: Callable[[Any], dict[str, Any]]) -> tuple[Tensor]:
        """Return the predictions ``(B, C, f, h, w)``, in a tuple as diffusers' networks do.

        If :attr:`rows_share_time`, a network that has no rows is skipped. Otherwise, it is skipped only in a single
        process: collective operations on sharded weights need it in the passes of all processes.

        Args:
            z: ``(B, ...)``, for those who count rows.
            timestep: ``(B,)``.
            inputs: Returns a network's arguments for some of the rows.
        """
        if z.is_meta:  # there are no times; both networks have the same size
            return (self.transformer(**inputs(slice(None)))[0],)
        is_early, outputs, order = timestep >= self.boundary, [], []
        for network, chosen in ((self.transformer, is_early), (self.transformer_2, ~is_early)):
            rows = chosen.nonzero()[:, 0]
            used = rows if len(rows) or self.rows_share_time or rank_and_world_size()[1] == 1 else rows.new_zeros(1)
            if len(used):
                outputs.append(network(**inputs(used))[0][: len(rows)])
            order.append(rows)
        return (torch.cat(outputs)[torch.cat(order).argsort()],)


@contextmanager
def rows_sharing_time(network: Any) -> Iterator[None]:
    """Tell a network inside the block that the rows of every pass share their time."""
    shares = isinstance(network, TwoNetworks)
    if shares:
        network.rows_share_time = True
    try:
        yield
    finally:
        if shares:
            network.rows_share_time = False
