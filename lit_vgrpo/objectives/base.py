"""What a training method must say: how it rolls out, what it keeps, and its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_vgrpo.ledger import PassLedger
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.rollout import STREAM_ROLLOUT, Experience, Rollout, RolloutSpec, image_generators, sample


class Objective(ABC):
    """A training method as a plain class; it knows no trainer.

    The calls of one iteration, in order: :meth:`collect`, :meth:`prepare`, then :meth:`loss` on every micro-batch of
    every update, then :meth:`after_iteration`.
    """

    needs_reward: ClassVar[bool] = True

    @abstractmethod
    def rollout_spec(self, iteration: int) -> RolloutSpec:
        """How the images of an iteration are sampled."""

    def check(self, updates_per_iteration: int) -> list[str]:
        """Settings that cannot work together, a line each."""
        return []

    def passes_per_image(self, updates: int) -> dict[str, int]:
        """Network passes an image by phase of the ledger; guidance counts twice, a backward is not counted."""
        spec = self.rollout_spec(0)
        return {"rollout": spec.steps * (1 if spec.guidance == 1.0 else 2)}

    def setup(self, policy: Policy) -> None:  # noqa: B027
        """Make whatever copies of the loaded policy the method keeps."""

    def collect(
        self,
        policy: Policy,
        prompts: Sequence[str],
        rows: Sequence[dict[str, Any]],
        slots: Sequence[int],
        group_size: int,
        iteration: int,
        seed: int,
        batch_size: int | None = None,
    ) -> Rollout:
        """Sample ``group_size`` images for each prompt.

        Args:
            prompts: one a group.
            rows: the prompts' data rows, one a group.
            slots: global number of each group in the iteration; with ``seed`` and ``iteration`` it fixes the noise.
            batch_size: images a network pass; ``None`` takes all at once.
        """
        spec = self.rollout_spec(iteration)
        group_rows, image_ids = group_layout(slots, group_size)
        conditioning = policy.encode(prompts)
        noise = policy.prior(image_generators(STREAM_ROLLOUT, seed, iteration, image_ids.tolist()))
        latents, schedule = sample(policy, conditioning, group_rows.to(noise.device), spec, noise, batch_size)
        return Rollout(
            latents=latents,
            group_ids=torch.tensor(slots)[group_rows],
            image_ids=image_ids,
            conditioning=conditioning,
            rows=group_rows.to(latents.device),
            schedule=schedule,
            iteration=iteration,
            seed=seed,
        )

    @abstractmethod
    def prepare(
        self,
        policy: Policy,
        rollout: Rollout,
        advantages: Tensor,
        *,
        micro_batch_size: int,
        updates: int,
        ledger: PassLedger | None = None,
    ) -> Experience:
        """Everything the loss needs again, computed before the first update.

        Args:
            advantages: ``(B,)``, float32.
            micro_batch_size: images a network pass; the same as in the updates, since kernels round by batch size.
            updates: gradient steps this iteration will take.
            ledger: where extra network passes are booked.
        """

    @abstractmethod
    def loss(self, policy: Policy, micro: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar loss of a micro-batch, and detached metrics, one value an image ``(M,)``."""

    def after_iteration(self, policy: Policy) -> None:  # noqa: B027
        """Move the copies that the method keeps."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Take over what :meth:`state_dict` gave."""


def group_layout(slots: Sequence[int], group_size: int) -> tuple[Tensor, Tensor]:
    """For images laid out group by group: each image's row among the groups, and its global index; both ``(B,)``."""
    rows = torch.arange(len(slots)).repeat_interleave(group_size)
    image_ids = torch.tensor(slots, dtype=torch.int64)[rows] * group_size + torch.arange(group_size).repeat(len(slots))
    return rows, image_ids
