"""The current iteration: what its updates need, and its state in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_vgrpo.core.gather import all_gather, all_gather_objects, all_gather_rows, gather_to_first, rank_and_world_size
from lit_vgrpo.core.records import IterationRecord, PassLedger, timed
from lit_vgrpo.core.sizes import group_layout
from lit_vgrpo.core.surrogate import Pairs
from lit_vgrpo.core.types import Conditioning, Experience, Rollout, Steps
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.objectives.base import Objective, PrepareContext
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.rewards import Weighted


@dataclass
class Iteration:
    """One iteration on this rank, from its rollout to its last update.

    Attributes:
        experience: This rank's images, in the order of the updates; ``None`` if a checkpoint was saved after the last.
        image_ids: Global index of each image, ``(B,)``, in that order.
        micros: The experience in micro-batches.
        splits_updates: Every update trains on a different share of the micro-batches, instead of all of them.
        updates_done: Updates taken or skipped so far.
    """

    experience: Experience | None
    image_ids: Tensor
    record: IterationRecord
    micro_batch_size: int
    num_updates: int
    splits_updates: bool
    updates_done: int = 0
    micros: list[Experience] = field(init=False)

    def __post_init__(self) -> None:
        self.micros = [] if self.experience is None else self.experience.micro_batches(self.micro_batch_size)

    @classmethod
    def prepared(
        cls,
        objective: Objective,
        policy: Policy,
        rollout: Rollout,
        advantages: Tensor,
        record: IterationRecord,
        batch: PromptBatch,
        ledger: PassLedger,
        replay: Replay,
        reward: Weighted | None = None,
    ) -> Iteration:
        """Return the iteration with the loss's inputs for this rank's images, in the order of the batch's updates.

        Args:
            advantages: Advantages of this rank's images, ``(B,)``, in rollout order.
            reward: The reward, for a method without advantages.
        """
        valid, weights = (~record.rewards.isnan()).float(), None
        if objective.uses_advantages and not valid.all():
            weights = (valid / valid.mean()).split(len(rollout))[rank_and_world_size()[0]]
            rollout = rollout.made_finite(weights == 0)
        own = rollout, advantages, weights
        replayed = replay.previous(rollout, batch) if objective.replay and record.has_advantage else None
        size, off_policy = batch.micro_batch_size, None
        if batch.order is not None:  # the first update does not train on the others' shares
            off_policy = torch.tensor(batch.order[len(batch.order) // batch.updates :])
        if replayed is not None:
            off_policy = None if off_policy is None else torch.cat([off_policy, off_policy + len(rollout)])
            again, old = replayed
            rollout = rollout.followed_by(again)
            if weights is not None or old.weights is not None:
                both = (weights, old.weights)
                weights = torch.cat([torch.ones(len(old)) if one is None else one.cpu() for one in both])
            advantages = torch.cat([advantages.to(old.advantages.device), old.advantages])
        context = PrepareContext(policy, rollout, advantages, size, batch.updates, ledger, off_policy, weights)
        if not objective.uses_advantages:
            groups = [batch.slots.index(slot) for slot in rollout.group_ids.tolist()]
            asked, rows = [batch.prompts[group] for group in groups], [batch.rows[group] for group in groups]
            context = replace(context, reward=reward, prompts=asked, data_rows=rows)
            record = replace(record, has_advantage=True)  # it trains on every image
        with timed(record.seconds, "prepare"), ledger.memory.during("prepare"):
            experience = objective.prepare(context) if record.has_advantage else context.experience()
        if objective.replay:
            replay.keep(*own)
        order, image_ids = training_order(batch, is_replayed=replayed is not None), rollout.image_ids
        if order is not None:
            experience, image_ids = experience.select(order.to(experience.latents.device)), image_ids[order]
            record = replace(record, local_group_ids=image_ids // batch.group_size)
        size = size if replayed is None else 2 * size
        return cls(experience, image_ids, record, size, batch.updates, batch.order is not None)

    @property
    def is_over(self) -> bool:
        """``True`` once the last update is done."""
        return self.updates_done == self.num_updates

    def __str__(self) -> str:
        return f"update {self.updates_done + 1} of iteration {self.record.iteration + 1}"

    def remaining_updates(self) -> Iterator[list[Experience]]:
        """Yield the micro-batches of each update that is not done; :meth:`end_update` ends one."""
        size = len(self.micros) // (self.num_updates if self.splits_updates else 1)
        while not self.is_over:
            first = self.updates_done * size % len(self.micros)
            yield self.micros[first : first + size]

    @property
    def _images_per_update(self) -> int:
        return len(self.image_ids) // (self.num_updates if self.splits_updates else 1)

    @property
    def _images_done(self) -> int:
        """Images that this rank passed in the updates that are done."""
        return self.updates_done * self._images_per_update

    def end_update(self, took_step: bool, norm: Tensor | None = None) -> None:
        """Count an update, whose gradient had a norm; the record counts only those that took a step."""
        self.updates_done += 1
        if norm is not None:
            self.record.metrics.setdefault("grad_norm", []).append(norm.expand(self._images_per_update))
        if took_step:
            self.record.updates += 1

    def state_dict(self) -> dict[str, Any]:
        """Return all ranks' images, see :func:`gathered`, so that any number of ranks can continue."""
        return {
            "updates_done": self.updates_done,
            "record": self.record.state_dict(),
            "unmoved": min(self.record.unmoved, self._images_done) * rank_and_world_size()[1],
            "metrics": {name: gather_to_first(values) for name, values in self._finished_metrics().items()},
            **({} if self.experience is None else gathered(self.experience, self.image_ids)),
        }

    def _finished_metrics(self) -> dict[str, Tensor]:
        """Return this rank's metrics of the finished updates, ``(B, passes)``, NaN for passes to come."""
        done, images = self._images_done, len(self.image_ids)
        metrics = {name: self.record.joined(name) for name in self.record.metrics} if done else {}
        passes = -(-done // images)
        own = [name for name, values in metrics.items() if len(values) >= done]  # some micro-batches lack the others
        known = set[str].intersection(*map(set, all_gather_objects(own)))
        return {
            name: F.pad(metrics[name][:done], (0, passes * images - done), value=torch.nan).view(passes, images).T
            for name in sorted(known)
        }

    @classmethod
    def restored(cls, state: dict[str, Any], batch: PromptBatch, device: torch.device) -> Iteration:
        """Return this rank's share of a saved iteration, with the metrics of its finished updates.

        Raises:
            RuntimeError: The state belongs to another iteration or other sizes.
        """
        _, wanted = group_layout(batch.slots, batch.group_size, batch.members)
        is_over = has_no_updates(state)
        is_replayed = not is_over and len(state["image_ids"]) > batch.images
        if is_replayed:
            wanted = torch.cat([wanted, wanted + batch.images])
        order = training_order(batch, is_replayed)
        wanted = wanted if order is None else wanted[order]
        experience = None if is_over else scattered(state, wanted, batch.group_size, device)
        then = state["record"]["iteration"]
        if (experience is None and not is_over) or then != batch.iteration:
            raise RuntimeError(
                f"The checkpoint was saved during iteration {then + 1}, with different prompts or sizes from those of "
                f"iteration {batch.iteration + 1} now. Resume with its recipe (RUN/config.yaml)."
            )
        record = IterationRecord(**state["record"], local_group_ids=wanted // batch.group_size)
        size = 2 * batch.micro_batch_size if is_replayed else batch.micro_batch_size
        is_split = batch.order is not None
        done = batch.updates if is_over else state["updates_done"]
        iteration = cls(experience, wanted, record, size, batch.updates, is_split, done)
        for name, values in state.get("metrics", {}).items():  # an earlier version saved none
            record.metrics[name] = [values[_places(state, wanted)].T.flatten()[: iteration._images_done]]
        record.unmoved = state.get("unmoved", 0) // rank_and_world_size()[1]
        return iteration


def has_no_updates(state: Mapping[str, Any]) -> bool:
    """Return True for the state of an iteration after its last update: only its record."""
    return "image_ids" not in state


class Replay:
    """The previous iteration's images and advantages, which the next iteration trains on again.

    They are numbered after that iteration's images, so they get new pairs.
    """

    def __init__(self) -> None:
        self._kept: tuple[Experience, Tensor] | None = None
        self._saved: dict[str, Any] | None = None

    def previous(self, rollout: Rollout, batch: PromptBatch) -> tuple[Rollout, Experience] | None:
        """Return the previous iteration's images, also with their advantages and weights, if there are any."""
        kept = self._kept
        if self._saved is not None:
            experience = scattered(self._saved, rollout.image_ids, rollout.group_size, rollout.latents.device)
            if experience is None:
                raise RuntimeError("The checkpoint has other sizes. Resume with its recipe (RUN/config.yaml).")
            kept = experience, rollout.image_ids
        if kept is None:
            return None
        old, image_ids = kept
        again = replace(
            rollout,
            latents=old.latents,
            conditioning=old.conditioning,
            rows=old.rows,
            group_ids=rollout.group_ids + batch.images // batch.group_size,
            image_ids=image_ids + batch.images,
            trajectory=None,
        )
        return again, old

    def keep(self, rollout: Rollout, advantages: Tensor, weights: Tensor | None) -> None:
        """Keep an iteration's images for the next one."""
        values = advantages.to(rollout.latents.device)
        groups, size = rollout.group_ids.to(values.device), rollout.group_size
        own = Experience(rollout.latents, values, rollout.conditioning, rollout.rows, groups, size, weights=weights)
        self._kept, self._saved = (own, rollout.image_ids), None

    def state_dict(self) -> dict[str, Any] | None:
        """Return all ranks' images, see :func:`gathered`."""
        return self._saved if self._kept is None else gathered(*self._kept)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Keep a checkpoint's images until the next iteration knows this rank's share."""
        self._saved, self._kept = state, None


def training_order(batch: PromptBatch, is_replayed: bool) -> Tensor | None:
    """Return the order in which this rank's images are trained on, ``(B,)``, or ``None`` for that of the rollout.

    In the experience, replayed images follow the new ones; each micro-batch has equal numbers of both.
    """
    order = None if batch.order is None else torch.tensor(batch.order)
    if not is_replayed:
        return order
    own = len(batch.slots) * len(batch.members)
    order = torch.arange(own) if order is None else order
    return torch.stack([order, order + own]).unflatten(1, (-1, batch.micro_batch_size)).transpose(0, 1).flatten()


def gathered(own: Experience, image_ids: Tensor) -> dict[str, Any]:
    """Return all ranks' images with their global indices ``(B,)``, as CPU tensors in the first process.

    All ranks must call it. The others, which write no checkpoint, get no rows.
    """
    state: dict[str, Any] = {
        "image_ids": gather_to_first(image_ids),
        "latents": gather_to_first(own.latents),
        "advantages": gather_to_first(own.advantages),
        "steps": None if own.steps is None else own.steps.map(gather_to_first).tensors(),
        "kept": {name: gather_to_first(value) for name, value in sorted(own.kept.items()) if not value.requires_grad},
        "weights": None if own.weights is None else gather_to_first(own.weights),
        **dict(zip(("rows", "conditioning"), _table(own.rows, own.conditioning.tensors), strict=True)),
        "pairs": None,
    }
    if own.pairs is not None:
        rows, values = _table(own.pairs.rows, own.pairs.table())
        state["pairs"] = {"rows": rows, "values": values, "shared": own.pairs.shared}
    return state


def scattered(state: dict[str, Any], wanted: Tensor, group_size: int, device: torch.device) -> Experience | None:
    """Return the images with the wanted global indices ``(B,)``, or ``None`` if one is missing."""
    position = _places(state, wanted)
    if not torch.equal(state["image_ids"][position], wanted):
        return None
    rows, conditioning = _compact(state["rows"][position], state["conditioning"], device)
    pairs = None
    if (table := state["pairs"]) is not None:
        pair_rows, values = _compact(table["rows"][position], table["values"], device)
        pairs = Pairs(values.pop("times"), values.pop("noise"), pair_rows, table["shared"], values)

    def own(value: Tensor) -> Tensor:
        return value[position].to(device)

    return Experience(
        latents=own(state["latents"]),
        advantages=own(state["advantages"]),
        conditioning=Conditioning(conditioning),
        rows=rows,
        group_ids=(wanted // group_size).to(device),
        group_size=group_size,
        pairs=pairs,
        steps=None if state["steps"] is None else Steps(**state["steps"]).map(own),
        kept={name: own(value) for name, value in state["kept"].items()},
        weights=None if state["weights"] is None else own(state["weights"]),
    )


def _places(state: dict[str, Any], wanted: Tensor) -> Tensor:
    """Return the saved rows of the images with the wanted global indices, any rows for those that are missing."""
    saved = state["image_ids"].argsort()
    return saved[torch.searchsorted(state["image_ids"][saved], wanted).clamp(max=len(saved) - 1)]


def _table(rows: Tensor, values: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return all ranks' rows and the values they index, as one table."""
    before = all_gather(torch.tensor([len(next(iter(values.values())))]))[: rank_and_world_size()[0]]
    table = {name: all_gather_rows(value, gather_to_first) for name, value in sorted(values.items())}
    return gather_to_first(rows + int(before.sum())), table


def _compact(rows: Tensor, values: dict[str, Tensor], device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the rows and only the values that they index."""
    used, rows = torch.unique(rows, return_inverse=True)
    return rows.to(device), {name: value[used].to(device) for name, value in values.items()}
