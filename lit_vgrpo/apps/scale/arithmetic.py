"""Bytes that GPUs exchange per iteration, its seconds, and sizes that divide; numbers only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from lit_vgrpo.core.sizes import Plan, Sizes, divisors

MACHINE = 8
"""GPUs of a machine."""
AUTO = 8
"""Largest micro-batch that ``data.micro_batch_size=auto`` is taken for."""
Kind = Literal["all_reduce", "gather", "scatter"]
Strategy = Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"]
Weight = tuple[int, int, bool]
"""A parameter: the length of its first dimension, the bytes of a row, and whether it is trained."""


@dataclass(frozen=True)
class Exchange:
    """A collective operation of every GPU, repeated in each iteration.

    Attributes:
        kind: ``all_reduce``, ``gather`` (all get all parts) or ``scatter`` (each gets the sum of one part).
        size: Bytes of the whole, on one GPU.
        ranks: GPUs that take part.
        times: Repetitions per iteration.
        in_update: False in sampling, and for the scores.
        crosses: True if the ranks are on several machines.
        rings: Groups of GPUs of a machine that do it at the same time.
    """

    kind: Kind
    size: int
    ranks: int
    times: float
    in_update: bool
    crosses: bool
    rings: int = 1

    @property
    def sent(self) -> float:
        """Bytes that each GPU sends per iteration, in a ring; an all-reduce scatters, then gathers."""
        return (2 if self.kind == "all_reduce" else 1) * self.size * (self.ranks - 1) / self.ranks * self.times

    def seconds(self, within: float, between: float) -> float:
        """Return the time, given the bytes per second of a GPU's link in its machine and of a machine's to others."""
        return max(self.sent / within, self.sent * self.rings / between if self.crosses else 0.0)


@dataclass(frozen=True)
class Calls:
    """Calls of the network on one GPU in an iteration: in sampling, and in updates without and with gradient.

    ZeRO-3 gives up all weights ``refills`` times: after a micro-batch, and when copies are swapped in or out.
    """

    sampling: int
    without_grad: float
    with_grad: float
    refills: int = 1


def exchanges(
    strategy: Strategy,
    weights: Sequence[Weight],
    calls: Calls,
    plan: Plan,
    gpus: int,
    shard_size: int | None = None,
    scores: int = 0,
    kept: float = 0.0,
) -> list[Exchange]:
    """Return what a strategy exchanges per iteration, without evaluations and checkpoints.

    DDP and ZeRO-1 reduce gradients once per update, the others with every micro-batch. ZeRO-1 and 2 gather the stepped
    weights. FSDP2 and ZeRO-3 gather all weights in every call, and again in its backward pass, except those that
    ZeRO-3 keeps. FSDP2 pads the rows of each weight to a multiple of its ranks.

    Args:
        shard_size: Ranks that shard the weights under FSDP2; the others hold replicas.
        scores: Bytes of all ranks' scores.
        kept: Share of the weights that ZeRO-3 keeps between a forward and its backward pass, or with 1, everywhere.
    """
    shards = shard_size or gpus if strategy == "fsdp2" else gpus
    multiple = shards if strategy == "fsdp2" else 1
    sizes = [(-(-rows // multiple) * multiple * row, is_trained) for rows, row, is_trained in weights]
    whole, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    micro_batches = plan.updates_per_iteration * plan.micro_batches_per_update

    def of(kind: Kind, size: int, times: float, in_update: bool = True) -> Exchange:
        return Exchange(kind, size, shards, times, in_update, shards > MACHINE)

    found = [Exchange("gather", scores, gpus, 1, False, gpus > MACHINE)]
    if strategy in ("fsdp2", "zero3"):
        sampling, updates = calls.sampling, calls.without_grad + (2 - kept) * calls.with_grad
        if kept == 1:
            sampling, updates = 1, calls.refills - 1
        found += [of("gather", whole, sampling, in_update=False), of("gather", whole, updates)]
        found += [of("scatter", trained, micro_batches)]
        if (replicas := gpus // shards) > 1:
            rings, size = min(shards, MACHINE), trained // shards
            found.append(Exchange("all_reduce", size, replicas, micro_batches, True, gpus > MACHINE, rings))
        return found
    found.append(of("all_reduce", trained, micro_batches if strategy == "zero2" else plan.updates_per_iteration))
    return found if strategy == "ddp" else [*found, of("gather", trained, plan.updates_per_iteration)]


@dataclass(frozen=True)
class Cost:
    """Seconds of one GPU per image, and per iteration on any number of GPUs."""

    sampling: float
    training: float
    rest: float = 0.0  # decoding and rewards on the GPU
    fixed: float = 0.0


@dataclass(frozen=True)
class Outlook:
    """An iteration on a number of GPUs.

    Attributes:
        sampled: Images that each GPU samples, with those that fill the last batch.
        batch: Images per batch of sampling.
        seconds: By cause: ``images``, ``padding``, ``exchange``, ``reward`` and ``other``; empty if unknown.
    """

    plan: Plan
    sampled: int
    batch: int
    exchanges: list[Exchange]
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Seconds of the iteration."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Share of the time that goes into images, if no batch is padded."""
        return self.seconds["images"] / (self.total - self.seconds["padding"])

    @property
    def sent(self) -> tuple[float, float]:
        """Bytes that a GPU sends per update and per iteration."""
        in_updates = sum(one.sent for one in self.exchanges if one.in_update)
        return in_updates / self.plan.updates_per_iteration, sum(one.sent for one in self.exchanges)

    def timed(self, cost: Cost, within: float, between: float, reward_rate: float | None) -> Outlook:
        """Return the same with seconds, in which exchanges overlap with nothing.

        Args:
            within: Bytes per second of a GPU to the others of its machine.
            between: Bytes per second of a machine to the others.
            reward_rate: Images per second that the slowest reward outside the GPUs scores, while all batches but the
                first are sampled; ``None`` if there is none.
        """
        images = self.plan.images_per_rank
        scoring = self.plan.images_per_iteration / reward_rate if reward_rate else 0.0
        seconds = {
            "images": images * (cost.sampling + cost.training + cost.rest),
            "padding": (self.sampled - images) * cost.sampling,
            "exchange": sum(one.seconds(within, between) for one in self.exchanges),
            "reward": max(0.0, scoring - cost.sampling * (self.sampled - self.batch) - cost.rest * images),
            "other": cost.fixed,
        }
        return replace(self, seconds=seconds)


def fitting(sizes: Sizes, ranks: int, fits: Callable[[Sizes], bool] = lambda sizes: True) -> Sizes | None:
    """Return the sizes that divide over ranks with the nearest number of prompts, or ``None`` if none was found.

    >>> fitting(Sizes(48, 24), 64).prompts_per_iteration
    64
    """
    prompts, most = sizes.prompts_per_iteration, AUTO if sizes.micro_batch_size == "auto" else sizes.micro_batch_size
    tried = range(1, 2 * max(prompts, ranks * sizes.updates_per_iteration) + 1)
    for number in sorted(tried, key=lambda n: (abs(n - prompts), -n)):
        found = replace(sizes, prompts_per_iteration=number, micro_batch_size="auto")
        if not found.errors(ranks) and fits(found):
            share = found.images_per_share(ranks)
            return replace(found, micro_batch_size=most if most > share else largest_divisor(share, most))
    return None


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor that is at most ``most``."""
    return max(d for d in divisors(number) if d <= most)
