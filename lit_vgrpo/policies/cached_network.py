"""Block caches in rollouts: a view of the network, some of whose blocks are skipped.

diffusers' hooks were read in 0.41.0 and 0.42.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from diffusers.hooks import (
    FirstBlockCacheConfig,
    HookRegistry,
    ModelHook,
    TaylorSeerCacheConfig,
    apply_first_block_cache,
    apply_taylorseer_cache,
)
from diffusers.models.cache_utils import CacheMixin
from torch import nn

from lit_vgrpo.core.types import BlockCache
from lit_vgrpo.policies.acceleration import compile_options, repeated_blocks, shared_view
from lit_vgrpo.policies.pipeline import PipelinePolicy


class CachedNetwork:
    """A view of a policy's network with one of diffusers' block caches.

    Args:
        policy: A loaded policy whose network is a transformer.
        cache: The cache and its settings.
    """

    def __init__(self, policy: PipelinePolicy, cache: BlockCache) -> None:
        self.source = policy.network
        self.network = shared_view(policy.network)
        blocks = repeated_blocks(self.network)
        self._blocks, self._passes = [_CountedBlock(policy.compile_network) for _ in blocks], _Counter()
        for module, hook in ((self.network, self._passes), *zip(blocks, self._blocks, strict=True)):
            HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, "lit_vgrpo")
        # SD3's network has no enable_cache(), which would call the same functions.
        if cache.kind == "first_block":
            apply_first_block_cache(self.network, FirstBlockCacheConfig(cache.threshold))
        else:
            apply_taylorseer_cache(
                self.network,
                TaylorSeerCacheConfig(
                    cache_interval=cache.interval,
                    disable_cache_before_step=cache.warm_up,
                    max_order=cache.order,
                    taylor_factors_dtype=torch.float32,
                    use_lite_mode=True,  # skips whole blocks and extrapolates the last layer
                ),
            )
        self._context = ExitStack()

    @property
    def blocks_run(self) -> float:
        """Share of the blocks that ran in the last sampling."""
        return sum(block.count for block in self._blocks) / max(1, self._passes.count * len(self._blocks))

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Reset the counts, and keep no tensors afterwards."""
        for counter in (self._passes, *self._blocks):
            counter.reset()
        try:
            self.start_batch()
            yield
        finally:
            self._forget()

    def start_batch(self) -> None:
        """Reset the cache for a new batch."""
        self._forget()
        # The rows of guidance's two branches share each pass, so one context holds both.
        self._context.enter_context(CacheMixin.cache_context(self.network, "rollout"))

    def _forget(self) -> None:
        self._context.close()
        HookRegistry.check_if_exists_or_initialize(self.network).reset_stateful_hooks()


class _Counter(ModelHook):
    """Counts a module's passes."""

    count = 0

    def reset(self) -> None:
        self.count = 0

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.count += 1
        return args, kwargs


class _CountedBlock(_Counter):
    """Runs a block inside the cache's hook.

    The last block of SD3 returns None for its text tokens, which are not used. The caches compute with a block's
    outputs, so it returns its input tokens instead.

    Args:
        compiles: Compile the block, but not the cache's hook around it, whose decisions torch cannot trace.
    """

    def __init__(self, compiles: bool) -> None:
        super().__init__()
        self._compiles = compiles
        self._run: Any = None

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._run is None:
            run = self.fn_ref.original_forward
            self._run = torch.compile(run, **compile_options()) if self._compiles else run
        output = self._run(*args, **kwargs)
        if not isinstance(output, tuple):
            return output
        return tuple(kwargs["encoder_hidden_states"] if part is None else part for part in output)
