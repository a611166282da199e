"""Held-out evaluation: images of held-out prompts, their scores, and the history of both."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice
from typing import Annotated, Any, Literal, Protocol, TypeVar, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_vgrpo.config.parts import built_part
from lit_vgrpo.core.batches import at_most
from lit_vgrpo.core.gather import all_gather_objects, all_gather_rows, rank_and_world_size
from lit_vgrpo.core.noise import STREAM_HELDOUT, image_generators, seed_of_run
from lit_vgrpo.core.pictures import PICTURE
from lit_vgrpo.core.pixels import strips
from lit_vgrpo.core.ranges import Range, checked
from lit_vgrpo.core.records import FINGERPRINT, Evaluation, PassLedger
from lit_vgrpo.core.sampling import sample
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.errors import RewardError, counted, score_text
from lit_vgrpo.metrics.looks import DISTANCE, LOOKS, distances, diversities, reduced, saturation, sharpness
from lit_vgrpo.objectives.base import Objective
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.placement import in_own_precision
from lit_vgrpo.rewards import ScoreQueue, Weighted, as_weighted
from lit_vgrpo.rewards.function import RewardsLike
from lit_vgrpo.system.process import bar
from lit_vgrpo.training.checkpoint import TRAINED, UNTRAINED
from lit_vgrpo.training.optimizer import Optimization
from lit_vgrpo.training.resume_guard import hashed, row_hash
from lit_vgrpo.training.saved_weights import averaged_weights, evaluated_weights
from lit_vgrpo.training.trainer_internals import declared


@checked
@dataclass
class EvaluationSpec(RolloutSpec):
    """A :class:`~lit_vgrpo.core.types.RolloutSpec` for held-out images; it does not inherit the rollout's values.

    Args:
        height: Height in pixels; null uses the policy's.
        width: Width in pixels; null uses the policy's.
    """

    height: Annotated[int, Range(1, 16_384)] | None = None
    width: Annotated[int, Range(1, 16_384)] | None = None


def evaluation_of(recipe: Mapping[str, Any]) -> RolloutSpec:
    """Return how a recipe samples held-out images; raise UserError if its evaluation or objective cannot be built."""
    spec: RolloutSpec | None = built_part(recipe, "model.evaluation", EvaluationSpec)
    return spec or built_part(recipe, "model.objective", Objective).rollout_spec(0).as_ode()


def sides_of(spec: RolloutSpec) -> tuple[int | None, int | None]:
    """Return the height and width of held-out images; ``None`` for the policy's."""
    return (spec.height, spec.width) if isinstance(spec, EvaluationSpec) else (None, None)


class TrainingModule(Protocol):
    """The attributes of :class:`~lit_vgrpo.module.VGRPOModule` that a run's checks, evaluations and strategies read."""

    policy: Policy
    objective: Objective
    reward: Weighted
    evaluator: Evaluator
    evaluation: EvaluationSpec | None
    optimization: Optimization
    rollout_batch_size: int | None
    gradient_clip_val: float | None
    gradient_clip_algorithm: Literal["norm", "value"]
    failed_images: Literal["leave_out", "stop"]
    unscorable: tuple[Any, list[Any], list[str]] | None
    ledger: PassLedger

    @property
    def iterations_done(self) -> int: ...

    @property
    def trainer(self) -> Trainer: ...

    @property
    def loggers(self) -> Sequence[Any]: ...


Module = TypeVar("Module", contravariant=True)


class HeldOutObserver(Protocol[Module]):
    """A metric of held-out images in addition to the reward, such as FID; called on every rank at every evaluation."""

    def update(self, images: Tensor, batch: PromptBatch) -> None:
        """Add a batch of this rank's images, ``(B, 3, H, W)`` in [0, 1]."""

    def compute(self, module: Module) -> dict[str, float]:
        """Return the metrics over all ranks' images since the last call, the same on every rank."""


class Looks:
    """Measurement of the held-out images of every evaluation; see ``lit_vgrpo.metrics.looks``."""

    def __init__(self) -> None:
        self.newest = torch.empty(0, 768)  # reduced images of the last evaluation, float16
        self.start_over()

    def start_over(self) -> None:
        """Discard the images of an interrupted evaluation."""
        self._measured: list[Tensor] = []
        self._numbers: list[tuple[int, int]] = []

    def update(self, images: Tensor, batch: PromptBatch) -> None:
        """Add a batch of this rank's images, ``(B, 3, H, W)`` in [0, 1]."""
        parts = [reduced(images), sharpness(images)[:, None], saturation(images)[:, None]]
        self._measured.append(torch.cat(parts, dim=1).float().cpu())
        asked = [f"{row['prompt']}\n{row.get(PICTURE)}" for row in batch.rows]
        self._numbers += [(slot, zlib.crc32(one.encode())) for slot, one in zip(batch.slots, asked, strict=True)]

    def compute(self, module: TrainingModule | None) -> dict[str, float]:
        """Return the metrics of all ranks' images, the same on every rank, and discard the images.

        Images that are not finite are left out, and metrics that cannot be measured.
        """
        numbers = all_gather_rows(torch.tensor(self._numbers, dtype=torch.int64))
        order = numbers[:, 0].argsort()
        measured, prompts = all_gather_rows(torch.cat(self._measured))[order], numbers[order, 1]
        self.start_over()
        small, per_image = measured[:, :-2], measured[:, -2:].double()
        is_finite = measured.isfinite().all(1)
        self.newest = small.half()
        values = [*diversities(small[is_finite], prompts[is_finite]), *per_image[is_finite].mean(0).tolist()]
        looks = dict(zip(LOOKS, values, strict=False))
        return {f"heldout/{name}": value for name, value in looks.items() if math.isfinite(value)}


class Evaluator:
    """Samples and scores images of held-out prompts; needs no trainer.

    Call :meth:`add` for every batch, then :meth:`means`, or :meth:`finish` with a trainer.

    Args:
        untrained: The untrained reward.
        spec: Sampling of the images; an ODE.
        batch_size: Images per forward pass, the last batch padded; ``None`` uses one batch.
        seed: Seed that, with an image's number, determines its noise; ``None`` uses that of ``seed_everything``, or 0.
        ledger: Counts the forward passes, under ``evaluation``.
        queue: Queue of the training images, whose threads are shared.

    Attributes:
        observed: Both rewards together.
        observers: Other metrics of the images.
        latest: Metrics of the last evaluation of ``fit``, ``heldout/...``.
        step: Optimizer steps at the last evaluation; -1 before the first.
        failed_shares: By metric, the share of its images that have no score in the last evaluation.
        history: The evaluations of the run so far.
        contents: Hashes of what the last one evaluated, by name.
        numbers: The images' numbers in the last one, in rank order.
    """

    def __init__(
        self,
        policy: Policy,
        reward: RewardsLike,
        untrained: RewardsLike | None = None,
        spec: RolloutSpec | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
        ledger: PassLedger | None = None,
        queue: ScoreQueue | None = None,
    ) -> None:
        self.policy, self.batch_size, self.seed = policy, batch_size, seed_of_run(seed)
        spec = spec or RolloutSpec()
        self.spec = spec if spec.solver else replace(spec, solver=spec.ode_solver(policy.solvers))
        self.sides = sides_of(self.spec)
        self.reward = as_weighted(reward)
        self.untrained = None if untrained is None else as_weighted(untrained, "model.untrained_reward")
        self.observed = self.reward.observing(self.untrained)
        # Before any call, since attributes of a reward may count its calls.
        self._rewards = {f"reward {part.name}": hashed(part) for part in self.observed.parts}
        self.ledger = ledger or PassLedger()
        self.looks = Looks()
        self.observers: list[HeldOutObserver[Any]] = [self.looks]
        self.latest: dict[str, float] = {}
        self.step = -1
        self.failed_shares: dict[str, float] = {}
        self.history: list[Evaluation] = []
        self.contents: dict[str, str] = {}
        self.numbers: list[int] = []
        self.num_heldout = 0  # images, also those that the trainer's limit leaves out
        self._starts: dict[int, Tensor] = {}  # reduced images of the first evaluation with each fingerprint
        self._num_predicted = 0
        self._sources: list[str] = []
        self._asked: dict[int, tuple[str, int]] = {}  # for each image, the hash of its row and its prompt's number
        self._bar: Any = None
        self._queue = ScoreQueue(self.observed, queue)
        self._of_images: dict[str, Tensor] = {}

    def describe(self) -> list[str]:
        """Return a line about held-out images whose size differs from the policy's."""
        with self.policy.sized(*self.sides):
            height, width = (side or "default" for side in (self.policy.height, self.policy.width))
        plan = f"{height} x {width} pixels, {self.spec.steps} steps, guidance {self.spec.guidance:g}"
        return [] if self.sides == (None, None) else [f"Held-out images: {plan}."]

    def newer_than(self, seen: Evaluation | None, step: int) -> Evaluation | None:
        """Return the newest evaluation if it is of the weights after ``step`` optimizer steps, and not ``seen``."""
        newest = self.history[-1] if self.step == step else None
        return None if newest is seen else newest

    @property
    def comparable(self) -> list[Evaluation]:
        """The evaluations that can be compared with the newest one, in order."""
        return [one for one in self.history if one.fingerprint == self.history[-1].fingerprint]

    @property
    def course(self) -> str:
        """The held-out reward at the first and the newest evaluation that compare; empty with one evaluation."""
        if len(comparable := self.comparable) < 2:
            return ""
        start, end = comparable[0], comparable[-1]
        when = f"after {counted(start.iteration, 'iteration')}" if start.iteration else "before"
        now = f"{score_text(end.reward)} after {counted(end.iteration, 'iteration')}"
        return f"Held-out reward {score_text(start.reward)} {when}, {now}"

    @property
    def device(self) -> torch.device:
        return self.policy.device

    # The trainer evaluates in inference mode, but cached embeddings are used in training too.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    @in_own_precision
    def generate(
        self, prompts: Sequence[str], image_ids: list[int], images: int = 0, references: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Sample images ``(B, 3, H, W)`` in [0, 1], or videos ``(B, F, 3, H, W)``.

        Args:
            image_ids: Numbers of the images, which with the seed determine their noise.
            images: Number of images over all ranks; 0 if unknown.
            references: The pictures that the prompts edit, ``(3, H, W)``, uint8.
        """
        with self.policy.sized(*self.sides):
            conditioning, rows = self.policy.encode_each(prompts, references)
            noise = self.policy.prior(image_generators(STREAM_HELDOUT, self.seed, 0, image_ids))
            size = at_most(images, self.batch_size)
            latents, _ = sample(self.policy, conditioning, rows, self.spec, noise, size)
            return self.policy.decode(latents)

    def generate_batch(self, batch: PromptBatch) -> Tensor:
        """Sample a held-out batch's images ``(B, 3, H, W)`` in [0, 1]."""
        return self.generate(*batch.padded(), batch.images, batch.references())[: len(batch.slots)]

    def start_over(self) -> None:
        """Discard the batches of an interrupted evaluation."""
        if len(self._queue):
            self._queue.close()
        self._sources, self._asked = [], {}
        if self._bar is not None:
            self._bar.close()
        self._bar = None
        for observer in self.observers:
            getattr(observer, "start_over", lambda: None)()

    @in_own_precision
    def add(self, batch: PromptBatch) -> None:
        """Sample a batch's images, show them to the observers and queue them; raise TypeError for another batch."""
        if not isinstance(batch, PromptBatch):
            what = f"a batch of type {type(batch).__name__}, not a PromptBatch"
            raise TypeError(f"The evaluation got {what}. Pass datamodule=PromptDataModule(...) instead of a loader.")
        if self._bar is None:
            self._bar = bar("Evaluating", is_brief=True, total=batch.images // rank_and_world_size()[1])
        self._ask(batch)
        self.num_heldout = batch.images
        self._sources += batch.sources
        with torch.inference_mode(mode=False), torch.no_grad(), self._queue.closed_on_error():
            with self.ledger.phase("evaluation"):
                images = self.generate_batch(batch)
            for observer in self.observers:
                observer.update(strips(images).clone(), batch)  # it may be a user's
            self._queue.put(images, batch.prompts, batch.rows)
        self._bar.update(len(batch.slots))

    def _ask(self, batch: PromptBatch) -> None:
        hashes = {id(row): row_hash(row) for row in batch.rows}  # a prompt's images share its row
        number, asked = batch.images_per_prompt, zip(batch.slots, batch.rows, strict=True)
        self._asked |= {slot: (hashes[id(row)], slot // number if number else 0) for slot, row in asked}

    def _read_contents(self, trainer: Trainer) -> tuple[dict[str, str], int]:
        """Return hashes of what the batches evaluate, and their fingerprint."""
        asked = {slot: row for own in all_gather_objects(self._asked) for slot, row in own.items()}
        self.numbers = list(asked)
        with self.policy.sized(*self.sides):
            size = dict(zip(("height", "width"), self.policy.image_size or (), strict=False))
        contents = {
            "prompts": [row for (row, _), _ in groupby(asked[slot] for slot in sorted(asked))],
            "images": sorted(asked),  # by number: how many of each prompt, and which part of the set
            "sampling": [{**asdict(self.spec), **size}, self.policy.num_frames, self.seed],
            "weights": evaluated_weights(trainer),
        }
        hashes = all_gather_objects({name: hashed(part) for name, part in contents.items()} | self._rewards)[0]
        return hashes, int(hashed(sorted(hashes.items()))[:6], 16)  # 24 bits: a float32 holds them

    def per_image(self, name: str) -> Tensor | None:
        """Return a metric of the last evaluation per image, ``(N,)``, NaN if it has none, or ``None``.

        The images are in the order of :attr:`numbers`.
        """
        return self._of_images.get(name)

    def means(self, module: TrainingModule | None = None, is_first: bool = False) -> dict[str, float]:
        """Return the means over all ranks' images that were scored, the same on every rank, and start over.

        ``heldout/reward`` is the trained reward, ``heldout/source/<name>`` that of each source of prompts,
        ``heldout/untrained_reward`` the untrained reward, ``heldout/<part>`` each reward alone, and ``heldout/failed``
        the number of images that a reward failed to score; a warning gives the reason.

        Args:
            module: Passed to the observers.
            is_first: It is the evaluation before training.

        Raises:
            RewardError: No image could be scored before training; on every rank.
        """
        scores = self._queue.take()
        values = {"heldout/reward": scores.total}
        if self.untrained is not None:
            values[UNTRAINED] = self.untrained.total(scores.parts, scores.applies)
        values |= {f"heldout/{name}": part for name, part in scores.parts.items()}
        applies = {f"heldout/{name}": scores.applies_to(name) for name in scores.parts}
        failed = [value.isnan() & applies.get(name, torch.ones_like(scores.ok)) for name, value in values.items()]
        # Each rank has a contiguous share of the images, in rank order.
        table = all_gather_rows(torch.stack([*values.values(), *failed], dim=1).double())
        of_images, is_failed = table.tensor_split(2, dim=1)
        self._of_images = dict(zip(values, of_images.unbind(dim=1), strict=True))
        lost = is_failed.sum(dim=0)
        self.failed_shares = dict(zip(values, (lost / (lost + of_images.isfinite().sum(dim=0))).tolist(), strict=True))
        means = {name: float(per_image.nanmean()) for name, per_image in self._of_images.items()}
        sources = [source for own in all_gather_objects(self._sources) for source in own]
        for source in sorted(set(sources)):
            own = torch.tensor([one == source for one in sources])
            means[f"heldout/source/{source}"] = float(self._of_images["heldout/reward"][own].nanmean())
            self.failed_shares[f"heldout/source/{source}"] = float(is_failed[own, 0].mean())
        num_failed = int(is_failed.any(dim=1).sum())
        if num_failed:
            reasons = {name: why for errors in all_gather_objects(scores.errors) for name, why in errors.items()}
            is_unscored = any(math.isnan(means.get(name, 0.0)) for name in (TRAINED, UNTRAINED))
            if is_first and is_unscored and not self.reward.is_only_logged:
                name, why = next(iter(reasons.items()), ("", "no message"))
                raise RewardError(f'No held-out image could be scored before training. Reward "{name}": {why}')
            for name, why in reasons.items():
                part = "some" if len(reasons) > 1 else f"{num_failed}"
                share = "all" if self._of_images[f"heldout/{name}"].isnan().all() else f"{part} of the"
                rank_zero_warn(f'Reward "{name}" failed for {share} {len(table)} held-out images: {why}')
        means["heldout/failed"] = float(num_failed)
        for observer in self.observers:
            means |= observer.compute(module)
        self.start_over()
        return means

    def evaluate(self, module: TrainingModule, logs: bool = False) -> dict[str, float]:
        """Evaluate on the trainer's held-out batches, and return the metrics; {} if there are none.

        As in validation, the weights are the average of the trainer's EMA callback, if it has one.

        Args:
            logs: Also log them, at the step at which the trainer logs the finished iteration.
        """
        self.start_over()
        with averaged_weights(module.trainer, cast(Any, module)):
            for batch in _batches(module.trainer):
                self.add(batch)
            metrics = self.finish(module) if len(self._queue) else {}
        if not metrics:
            self.latest = {}  # not those of an earlier fit, or of the run that this one resumes
        else:
            trainer = module.trainer
            epoch = {"epoch": module.iterations_done - 1} if module.iterations_done else {}
            for logger in module.loggers if logs else ():  # at the iteration's last step, as Lightning counts it
                logger.log_metrics(metrics | epoch, step=max(trainer.global_step - 1, 0))
        return self.latest

    def evaluate_end(self, module: TrainingModule) -> None:
        """Evaluate and log the final weights, unless the newest evaluation is of them."""
        if self.step != module.trainer.global_step:
            self.evaluate(module, logs=True)

    def is_new(self, trainer: Trainer) -> bool:
        """Return True if the run has no evaluation to compare with, as after a resume with other held-out prompts."""
        for batch in _batches(trainer):
            self._ask(batch)
        is_new = bool(self._asked) and self._read_contents(trainer)[1] not in self._starts
        self.start_over()
        return is_new

    def finish(self, module: TrainingModule) -> dict[str, float]:
        """Return the means of the added batches; those of ``fit`` enter the history, with the cost of training."""
        trainer = module.trainer
        contents, fingerprint = self._read_contents(trainer)
        is_first = trainer.state.fn == "fit" and trainer.global_step == 0
        means = self.means(module, is_first=is_first)
        newest, start = self.looks.newest, self._starts.get(fingerprint, self.looks.newest)
        if is_first or fingerprint in self._starts:  # else there is no start to compare with
            means[f"heldout/{DISTANCE}"] = float(distances(newest.float(), start.float()).nanmean())
        if trainer.testing:
            return {name.replace("heldout", "test", 1): value for name, value in means.items()}
        mark: dict[str, float] = {f"heldout/{FINGERPRINT}": fingerprint}
        if trainer.state.fn != "fit":  # validate leaves no trace
            return means | mark
        iteration = module.iterations_done
        if self.history and contents != self.contents:
            names = [name for name in self.contents | contents if self.contents.get(name) != contents.get(name)]
            what, baseline = ", ".join(names), "are compared with the earlier ones of the same"
            if fingerprint not in self._starts:
                baseline = "are a new baseline, and are not compared with earlier ones"
            rank_zero_warn(f"The held-out evaluation changed ({what}): those from iteration {iteration} on {baseline}.")
        self._starts[fingerprint] = start
        self.latest, self.step, self.contents = means, trainer.global_step, contents
        scores, ledger = self._of_images["heldout/reward"], self.ledger
        metrics = means | mark | {"heldout/reward_std": float((scores - scores.nanmean()).square().nanmean().sqrt())}
        self.history.append(
            Evaluation(
                iteration=iteration,
                reward=means["heldout/reward"],
                images=ledger.images,
                passes=ledger.training_passes(),
                train_seconds=ledger.stopwatch.wall_s,
                cpu_seconds=ledger.stopwatch.cpu_s,
                forward_equivalents=ledger.training_equivalents(),
                phases={name: dict(count) for name, count in ledger.training_counts().items()},
                fingerprint=fingerprint,
                metrics={n.removeprefix("heldout/"): float(x) for n, x in metrics.items() if math.isfinite(x)},
            )
        )
        return means | mark

    def predict(
        self, batch: PromptBatch | Sequence[str], is_first: bool = True, rank: int = 0, world_size: int = 1
    ) -> Tensor:
        """Return images ``(B, 3, H, W)`` in [0, 1] of a held-out batch, or of the rank's next texts.

        Prompt n starts from noise n: a loader's batches are assigned to ranks in turn. ``is_first`` restarts at 0.
        """
        self._num_predicted = 0 if is_first else self._num_predicted
        if isinstance(batch, PromptBatch):
            with self.ledger.phase("evaluation"):
                return self.generate_batch(batch)
        first, self._num_predicted = self._num_predicted, self._num_predicted + len(batch)
        numbers = [rank + world_size * number for number in range(first, self._num_predicted)]
        with self.ledger.phase("evaluation"):
            return self.generate(batch, numbers)

    def state_dict(self) -> dict[str, Any]:
        return {"history": [asdict(one) for one in self.history], "contents": self.contents, "starts": self._starts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history, self.step = [Evaluation(**values) for values in state["history"]], -1
        newest = self.history[-1].metrics if self.history else {}
        self.latest = {
            f"heldout/{name}": value for name, value in newest.items() if name not in ("reward_std", FINGERPRINT)
        }
        self.contents, self._starts = dict(state["contents"]), dict(state["starts"])

    def add_starts(self, state: Mapping[str, Any]) -> None:
        """Compare later images also with those of a saved state's first evaluations."""
        self._starts |= state["starts"]


def _batches(trainer: Trainer) -> Iterator[PromptBatch]:
    """Yield the held-out batches within the trainer's limit."""
    batches, limit = declared(trainer).datamodule.val_dataloader(), trainer.limit_val_batches
    yield from islice(batches, limit if isinstance(limit, int) else int(limit * len(batches)))
