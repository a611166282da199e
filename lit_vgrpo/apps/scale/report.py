"""``lightning check --scale``: a recipe on several numbers of GPUs, as a table with what to type."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from math import lcm
from typing import TYPE_CHECKING

import torch

from lit_vgrpo.apps.scale.arithmetic import (
    MACHINE,
    Calls,
    Cost,
    Outlook,
    Strategy,
    exchanges,
    fitting,
    largest_divisor,
)
from lit_vgrpo.core.batches import at_most
from lit_vgrpo.core.sizes import Plan, Sizes, divisors
from lit_vgrpo.errors import UserError
from lit_vgrpo.options import Check
from lit_vgrpo.policies.meta import NotEstimated, policy_on_meta
from lit_vgrpo.rewards import Scores
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.training.memory_passes import demand
from lit_vgrpo.training.sharded import FSDP2, ZeRO

if TYPE_CHECKING:
    from lit_vgrpo.launch.recipe_cli import RecipeCLI

LARGEST = 100_000
HALF = 0.5
"""Share of the time that must go into images for GPUs to pay."""
HEADS = ("GPUs", "images per GPU", "sent per update", "sent per iteration")
TIMES = ("seconds", "images/s", "images", "padding", "exchange", "reward", "other")
MEASURED = {
    ("SD3Policy", 2_243_171_520, (512, 512), None, False): ("H100", 24, (40, 4), (10.7, 1.0, 3.6, 0.7)),
    ("SD3Policy", 2_243_171_520, (512, 512), None, True): ("H100", 24, (40, 4), (5.0, 1.0, 1.7, 0.9)),
    ("WanPolicy", 1_418_996_800, (240, 416), 33, False): ("H100", 8, (40, 4), (15.0, 3.8, 5.1, 1.3)),
    ("WanPolicy", 1_418_996_800, (240, 416), 33, True): ("H100", 8, (40, 4), (8.2, 3.7, 3.0, 0.9)),
    ("SDXLPolicy", 2_567_463_684, (1024, 1024), None, False): ("H200", 16, (20, 4), (9.1, 2.7, 5.5, 1.8)),
    ("SDXLPolicy", 2_567_463_684, (1024, 1024), None, True): ("H200", 16, (20, 4), (7.1, 2.8, 4.8, 1.5)),
    ("QwenImagePolicy", 20_430_597_696, (512, 512), None, False): ("H200", 12, (20, 4), (12.1, 0.7, 9.0, 2.9)),
    ("QwenImagePolicy", 20_430_597_696, (512, 512), None, True): ("H200", 12, (20, 4), (8.1, 0.7, 6.3, 2.3)),
}
"""Whole iterations of a LoRA in bfloat16 on one GPU, from ``benchmarks/results/gpu.md``.

By policy, frozen weights, height and width, frames, and ``compile``: the card, the images, each image's passes in
sampling and with backward, and the seconds of sampling, of decoding and reward, of updates, and of the rest.
"""


def scale_report(cli: RecipeCLI, options: Check) -> str:
    """Return the table and its notes; raise UserError if the pipeline's configuration files are not here."""
    counts = [int(number) for number in numbers("--scale", f"{options.scale}", "1,8,64,512", is_whole=True)]
    within, between = numbers("--bandwidth", options.bandwidth, "360,40", 2)
    given = options.seconds_per_image and numbers("--seconds-per-image", options.seconds_per_image, "0.5,0.2", 2)
    recipe = ScaledRecipe(cli)
    cost, source = recipe.cost(Cost(*given) if given else None)

    def outlook(gpus: int) -> Outlook | None:
        if (sizes := recipe.fitting(gpus)) is None:
            return None
        found = recipe.outlook(sizes, gpus)
        return found if cost is None else found.timed(cost, within * 1e9, between * 1e9, options.reward_rate)

    found = {gpus: outlook(gpus) for gpus in counts}
    trained, whole = (
        sum(rows * row for rows, row, is_trained in recipe.weights if is_trained or everything)
        for everything in (False, True)
    )
    lines = [f"{cli.config.name} under {recipe.strategy}: trains {amount(trained)} of a network of {amount(whole)}"]
    lines += [table(found), *filter(None, map(recipe.advice, counts)), source, *recipe.notes(options.reward_rate)]
    if cost is not None:
        dividing = [n for n in range(1, max(counts) + 1) if not recipe.errors(n)]
        paying = [n for n in dividing if (one := outlook(n)) is not None and one.share >= HALF]
        lines += [
            f"Exchanges take their bytes at {within:g} GB/s between the GPUs of a machine and {between:g} GB/s between "
            f"machines of {MACHINE} (--bandwidth), and overlap with nothing. Latency is not included.",
            f"The recipe's sizes divide over {max(dividing, default=0)} GPUs at most, up to {max(counts)}. At least "
            f"half of the time goes into images up to {max(paying, default=0)}, if no batch is padded.",
        ]
    return "\n".join(lines)


class ScaledRecipe:
    """A recipe whose sizes, network calls and bytes are counted for any number of GPUs."""

    def __init__(self, cli: RecipeCLI) -> None:
        self.module, self.sizes, strategy = cli.model, cli.datamodule.sizes, cli.trainer.strategy
        self.shard_size, self.per_rank = getattr(strategy, "shard_size", None), getattr(strategy, "context_parallel", 1)
        self.strategy: Strategy = "fsdp2" if isinstance(strategy, FSDP2) else "ddp"
        self._zero: dict[str, int] = {}
        if isinstance(strategy, ZeRO):
            self.strategy = f"zero{strategy.stage}"  # type: ignore[assignment]
            self._zero = (strategy.config or {})["zero_optimization"]
        try:
            self.policy = policy_on_meta(self.module.policy)
        except (NotEstimated, LoadError) as error:
            raise UserError(f"--scale needs the shapes of the weights: {error}") from error
        weights = [(w.reshape(1) if w.ndim == 0 else w, w.requires_grad) for w in self.policy.network.parameters()]
        self.weights = [(len(w), w[:1].numel() * w.element_size(), is_trained) for w, is_trained in weights]

    # --- sizes -----------------------------------------------------------------------------------------------------

    def errors(self, gpus: int, sizes: Sizes | None = None) -> list[str]:
        """Return the first error of the recipe's sizes, or of others, on a number of GPUs."""
        sizes, ranks = sizes or self.sizes, gpus // self.per_rank
        for name, size in (("context_parallel", self.per_rank), ("shard_size", self.shard_size or 1)):
            if gpus % size:
                return [f"trainer.strategy.{name}={size} does not divide {gpus}"]
        if self.module.reward.compares and ranks > sizes.prompts_per_iteration:
            return [f"prompts_per_iteration={sizes.prompts_per_iteration} splits groups, which the reward compares"]
        return sizes.errors(ranks)

    def fitting(self, gpus: int) -> Sizes | None:
        """Return the nearest sizes that divide over a number of GPUs."""
        if gpus % lcm(self.per_rank, self.shard_size or 1):
            return None
        return fitting(self.sizes, gpus // self.per_rank, lambda sizes: not self.errors(gpus, sizes))

    def advice(self, gpus: int) -> str | None:
        """Return what to type for a number of GPUs over which sizes do not divide, in one line."""
        errors, sizes, typed, others = self.errors(gpus), self.fitting(gpus), [], []
        reason = "the last batch of sampling is padded"
        if errors:
            reason = errors[0].partition(". ")[0].rstrip(".")
            for name in ("prompts_per_iteration", "micro_batch_size"):
                if sizes is not None and (value := getattr(sizes, name)) != getattr(self.sizes, name):
                    typed.append(f"data.{name}={value}")
            updates = self.sizes.updates_per_iteration
            fits = (
                n
                for n in divisors(updates)[-2::-1]
                if not self.errors(gpus, replace(self.sizes, updates_per_iteration=n))
            )
            others += [f"data.updates_per_iteration={n}" for n in fits][:1]
            others += [f"use {n} GPUs" for n in range(gpus - 1, 0, -1) if not self.errors(n)][:1]
        if sizes is not None and (plan := sizes.plan(gpus // self.per_rank)).images_per_rank % self._batch(plan):
            typed.append(f"model.rollout_batch_size={largest_divisor(plan.images_per_rank, self._batch(plan))}")
        choices = ", or ".join([*filter(None, [" ".join(typed)]), *others])
        if not errors and not typed:
            return None
        return f"{gpus} GPUs: {reason}.{f' Set {choices}.' if choices else ''}"

    def _batch(self, plan: Plan) -> int:
        """Return the images per batch of sampling on a rank."""
        return at_most(plan.images_per_iteration, self.module.rollout_batch_size) or plan.images_per_rank

    # --- calls, bytes and seconds ----------------------------------------------------------------------------------

    @cached_property
    def _calls_of_micro_batch(self) -> int:
        sizes = fitting(self.sizes, 1)
        assert sizes is not None  # one image per micro-batch always divides
        return demand(self.module.objective, self.policy, sizes.plan(1)).trained.times

    def _calls(self, sizes: Sizes, plan: Plan) -> Calls:
        objective, sizes = self.module.objective, replace(sizes, ranks=plan.world_size)
        per_image, copies = objective.prediction_passes(sizes), objective.copies_needed()
        calls = plan.images_per_rank / plan.micro_batch_size * self._calls_of_micro_batch
        calls /= objective.predictions_per_image(sizes)
        with_grad = per_image.pop("update")
        # Replay makes an update's micro-batches twice as large, and those of the passes before it twice as many.
        twice = [name for name in per_image if name not in copies or copies[name].asked != "update"]
        without = sum(number * (1 + (objective.replay and name in twice)) for name, number in per_image.items())
        sampling = -(-plan.images_per_rank // self._batch(plan)) * objective.rollout_spec(0).network_calls
        return Calls(sampling, without * calls, with_grad * calls, self._refills(plan))

    def _refills(self, plan: Plan) -> int:
        micro_batches = plan.updates_per_iteration * plan.micro_batches_per_update
        copies = self.module.objective.copies_needed().values()
        found, is_full = 1 + micro_batches, all(copy.samples_from is None for copy in copies)
        for copy in copies:
            if copy.needs_pass(plan.updates_per_iteration if copy.asked == "iteration" else 1):
                found += micro_batches if copy.asked == "update" else copy.decay != 0 or not is_full
                is_full = copy.decay == 0  # other copies are swapped in and out
        return found

    @property
    def kept(self) -> float:
        """Share of the weights that ZeRO-3 keeps, by deepspeed 0.19.8, once it has recorded an iteration.

        It prefetches up to a number of live weights, and keeps what is used again within a distance.
        """
        live, reuse = (self._zero.get(f"stage3_max_{n}", 10**9) for n in ("live_parameters", "reuse_distance"))
        size = sum(w.numel() for w in self.policy.network.parameters())
        return 0.0 if self.strategy != "zero3" else 1.0 if size <= max(live, reuse) else live / size

    def outlook(self, sizes: Sizes, gpus: int, kept: float | None = None) -> Outlook:
        """Return an iteration with sizes that divide over a number of GPUs."""
        plan = sizes.plan(gpus // self.per_rank)
        images, batch = plan.images_per_rank, self._batch(plan)
        scores = plan.world_size * bytes_of_scores(self.module.reward.part_names, images)
        calls, kept = self._calls(sizes, plan), self.kept if kept is None else kept
        found = exchanges(self.strategy, self.weights, calls, plan, gpus, self.shard_size, scores, kept)
        return Outlook(plan, -(-images // batch) * batch, batch, found)

    def cost(self, given: Cost | None) -> tuple[Cost | None, str]:
        """Return the seconds per image, if they are known, and where they are from."""
        policy, frozen = self.module.policy, [w for w in self.policy.network.parameters() if not w.requires_grad]
        key = type(policy).__name__, sum(w.numel() for w in frozen), policy.image_size, policy.num_frames
        is_16_bit = policy.dtype == torch.bfloat16 and policy.quantisation is None
        known = MEASURED.get((*key, policy.compile_network is True)) if is_16_bit else None
        if given is not None:
            return given, "Seconds per image on one GPU: given."
        if known is None:
            what = f"{policy.checkpoint} with this size and these options"
            return None, f"No seconds: {what} was not timed. Give --seconds-per-image SAMPLING,TRAINING of one GPU."
        card, images, (sampled, trained), (sampling, rest, update, fixed) = known
        forward, backward = sampling / images / sampled, update / images / trained
        passes = self.module.objective.passes_per_image(self.sizes, policy)
        in_sampling = passes.pop("rollout") * forward
        in_updates = sum(number * (backward if phase == "update" else forward) for phase, number in passes.items())
        source = f"Seconds per image: measured on one {card}, with the recipe's batches; smaller ones take longer."
        return Cost(in_sampling, in_updates, rest / images, fixed), source

    def notes(self, reward_rate: float | None) -> Iterator[str]:
        """Yield what the table leaves out."""
        waiting = [part.name for part in self.module.reward.parts if part.reward.concurrent]
        if waiting and reward_rate is None:
            yield f"Waiting for {', '.join(waiting)} is not included: give --reward-rate, its images per second."
        if self.strategy == "zero3" and (sizes := self.fitting(MACHINE)):
            most, usual = (amount(self.outlook(sizes, MACHINE, kept).sent[1]) for kept in (0.0, None))
            yield (
                f"ZeRO-3 is taken to keep {self.kept:.0%} of the weights gathered, as DeepSpeed does from the third of "
                f"several iterations with the same passes. Before, and after an evaluation, it keeps none: {MACHINE} "
                f"GPUs then send up to {most} per iteration, not {usual}."
            )
        if self.per_rank > 1:
            yield "The tokens that context parallelism exchanges are not included."
        if self.sizes.micro_batch_size == "auto":
            yield "data.micro_batch_size=auto is taken for at most 8."


def bytes_of_scores(names: list[str], images: int) -> int:
    """Return the bytes of a rank's scores and group numbers, as they are gathered."""
    values, ok = torch.zeros(images), torch.ones(images, dtype=torch.bool)
    parts, applies = ({name: one.clone() for name in names} for one in (values, ok))
    counts: dict[str, dict[str, float]] = {name: {} for name in names}
    return len(pickle.dumps(Scores(values, parts, ok, {}, applies, dict.fromkeys(names, 0.5), counts))) + 8 * images


def table(found: Mapping[int, Outlook | None]) -> str:
    """Return an aligned table with a row for each number of GPUs; the last five columns share the time."""
    is_timed = any(one and one.seconds for one in found.values())
    rows = [[*HEADS, *(TIMES if is_timed else ())]]
    for gpus, one in found.items():
        row = [f"{gpus}"]
        if one is not None:
            row += [f"{one.plan.images_per_rank}", *map(amount, one.sent)]
        if one is not None and is_timed:
            row += [f"{one.total:.1f}", f"{one.plan.images_per_iteration / one.total:.1f}"]
            row += [f"{value / one.total:.0%}" for value in one.seconds.values()]
        rows.append(row + ["-"] * (len(rows[0]) - len(row)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows)


def amount(size: float) -> str:
    """Return bytes in a unit of a power of 1,000, as bandwidths are given.

    >>> [amount(size) for size in (0, 2_500, 1.5e6, 2e12)]
    ['0 B', '2.5 kB', '1.5 MB', '2000.0 GB']
    """
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    return next((f"{size / number:.1f} {unit}" for unit, number in units if size >= number), f"{size:.0f} B")


def numbers(option: str, text: str, example: str, length: int = 0, is_whole: bool = False) -> list[float]:
    """Return an option's positive numbers, separated by commas; raise UserError for anything else."""
    try:
        found = [float(int(part) if is_whole else part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or len(found) != (length or len(found)) or not all(0 < number <= LARGEST for number in found):
        what = f"{length or 'a list of'} positive {'whole ' * is_whole}numbers"
        raise UserError(f"{option} {text} is not {what}. Write it as {option} {example}.")
    return found
