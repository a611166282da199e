"""``data.micro_batch_size: auto``: the most images that fit into memory in one forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice

import torch

from lit_vgrpo.core.gather import all_gather, image_ranks
from lit_vgrpo.core.sharding import local
from lit_vgrpo.core.sizes import Plan, divisors
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.errors import say
from lit_vgrpo.policies.placement import place
from lit_vgrpo.rewards.model import ModelReward
from lit_vgrpo.system.memory import available_bytes, measured_memory
from lit_vgrpo.training.evaluation import TrainingModule
from lit_vgrpo.training.memory_passes import LiveMemory, demand, prepared
from lit_vgrpo.training.optimizer import CustomOptimizer, OptimizerConfig
from lit_vgrpo.training.sharded import FSDP2
from lit_vgrpo.training.trainer_internals import declared

SAFE_SHARE = 0.9
"""Share of the free memory to use; the rest is for temporary buffers of kernels."""
TOO_MUCH = 2**62


def choose_micro_batch_size(module: TrainingModule) -> None:
    """Choose the micro-batch size if it is ``"auto"``, the same on all ranks, and report it.

    Raises:
        RuntimeError: Not even one image fits into memory.
    """
    trainer = declared(module.trainer)
    trainer.datamodule.found_micro_batch_size = None  # of an earlier fit
    sizes = trainer.datamodule.sizes
    if sizes.micro_batch_size != "auto":
        return
    ranks = image_ranks(trainer)[1]
    share = sizes.images_per_share(ranks)
    rows = islice(trainer.datamodule.training_rows(), 1000)
    prompt = max((row["prompt"] for row in rows), key=len)  # it may have more tokens than others
    trial = Trial(module, module.optimization.optimizer, sizes.plan(ranks), prompt)
    with trial.without_trace():
        trial.taken(1)  # libraries allocate workspaces on first use, and the method's copies move to the device
        room = -trial.most_of_ranks(-trial.room())
        size, taken = largest_that_fits(divisors(share), room, lambda images: trial.most_of_ranks(trial.taken(images)))
    trainer.datamodule.found_micro_batch_size = size
    if trainer.is_global_zero:
        say(f"micro_batch_size: {size} of {share} images per update fit: {shown(taken)} of {shown(room)} free")
    for logger in module.loggers:
        logger.log_metrics({"train/micro_batch_size": float(size)}, step=trainer.global_step)


def largest_that_fits(sizes: list[int], room: int, taken: Callable[[int], int]) -> tuple[int, int]:
    """Return the largest size that needs no more than ``room``, and the bytes it took.

    Memory is the maximum of several linear functions of the size, so a line through two sizes can only underestimate
    it: a size for which even that line exceeds ``room`` is not tried.

    Args:
        sizes: Candidate sizes, ascending.
        taken: Returns the bytes of a trial; ``TOO_MUCH`` if it failed.

    >>> largest_that_fits([1, 2, 3, 4, 6, 12], 70, lambda size: 10 * size + 5)
    (6, 65)
    """
    fitting: list[tuple[int, int]] = []
    for size in sizes:
        if len(fitting) > 1:
            (before, less), (last, more) = fitting[-2:]
            if more + (more - less) / (last - before) * (size - last) > room:
                break
        if (needed := taken(size)) > room:
            break
        fitting.append((size, needed))
    if not fitting:
        raise RuntimeError(
            f"data.micro_batch_size=auto: not even one image fits into {shown(room)} of free memory. "
            "Set model.policy.gradient_checkpointing=true, or a smaller height and width."
        )
    return fitting[-1]


@dataclass
class Trial:
    """Trial steps of the method on dummy images, without effect on weights, method and counts.

    Args:
        plan: The plan with one image per micro-batch.
        prompt: Prompt whose embedding is used for all images.
    """

    module: TrainingModule
    optimizer: OptimizerConfig | CustomOptimizer
    plan: Plan
    prompt: str

    def __post_init__(self) -> None:
        policy, objective = self.module.policy, self.module.objective
        self.device = policy.device
        self.storage_device = objective.rollout_device or self.device
        self.conditioning = policy.encode([self.prompt], policy.blank_references(1)).to(self.storage_device)
        self.weights = list(trainable_parameters(policy).values())
        # The VAE and the rewards' models are on the device in training too.
        place([policy.pipeline.vae], self.device)
        for reward in self.module.evaluator.observed.leaves():
            reward.load()
            if isinstance(reward, ModelReward):
                reward(torch.zeros(0, 3, 1, 1, device=self.device), [], [])  # without images it only moves its model

    def room(self) -> int:
        """Return the bytes that a step may take: free memory minus later permanent allocations of training."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info(self.device)[0]
            free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        else:
            free = available_bytes() // max(1, self.module.trainer.num_devices)
        latent = 4 * torch.Size(self.module.policy.latent_shape).numel()
        kept = demand(self.module.objective, self.module.policy, self.plan).kept * latent
        own = [local(weight) for weight in self.weights]
        optimizer_bytes = self.optimizer.state_bytes(own)
        stored_bytes = round(kept) if self.storage_device.type == self.device.type else 0
        # An update's gradients are alive from its second micro-batch on; the optimizer's temporaries take as much.
        gradients = sum(weight.nbytes for weight in own) if self.plan.micro_batches_per_update > 1 else 0
        return int(SAFE_SHARE * free) - optimizer_bytes - stored_bytes - gradients

    def most_of_ranks(self, value: int) -> int:
        """Return the largest value of any rank; all ranks must call it."""
        return int(all_gather(torch.tensor([value]), every_process=True).max())

    @contextmanager
    def without_trace(self) -> Iterator[None]:
        """Restore the counts and the random generators after the block."""
        counts = self.module.ledger.state_dict()
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices):
                yield
        finally:
            self.module.ledger.load_state_dict(counts)

    def taken(self, images: int) -> int:
        """Return the additional peak bytes of a step on this many images; ``TOO_MUCH`` if it fails."""
        try:
            if self.device.type == "cuda":
                with measured_memory() as use:
                    self.run(images)
                return use.gpu or 0
            # Not resident memory: later trials reuse what the first has freed.
            with LiveMemory() as live:
                self.run(images)
            return live.peak
        except torch.OutOfMemoryError:
            if isinstance(self.module.trainer.strategy, FSDP2):
                raise  # the other ranks wait in a collective
        torch.cuda.empty_cache()
        return TOO_MUCH

    def run(self, images: int) -> None:
        """Run one micro-batch, from its stored predictions to its gradients.

        With ``split_updates`` it is one of a later share: the first has no passes of the old policy, hence less memory.
        """
        policy, objective = self.module.policy, self.module.objective
        plugin = self.module.trainer.precision_plugin
        with torch.enable_grad(), plugin.train_step_context() if plugin is not None else nullcontext():
            shape = policy.latent_shape
            _, experience = prepared(objective, policy, self.conditioning, shape, images, self.plan, images)
            (micro,) = experience.micro_batches(len(experience))  # twice the images with replay
            objective.before_update(policy, [micro])
            loss, _ = objective.loss(policy, micro)
        if not isinstance(self.module.trainer.strategy, FSDP2):
            # Not backward(), which triggers the strategy's gradient hooks.
            torch.autograd.grad(loss, self.weights, allow_unused=True)
            return
        loss.backward()  # the gathered weights of a pass are not the optimizer's parameters
        for weight in self.weights:
            weight.grad = None


def shown(size: int) -> str:
    """Format a number of bytes."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
