"""Denoising pre-training: the surrogate itself as the loss, on given images instead of rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Protocol

import torch
from torch import Tensor

from lit_vgrpo.core.pass_counter import PassLedger
from lit_vgrpo.core.probability_paths import Space
from lit_vgrpo.core.ranges import PositiveFloat, Range, checked
from lit_vgrpo.core.rollout import Experience, Rollout, RolloutSpec
from lit_vgrpo.core.sampling import STREAM_DATA, BatchHook, image_generators
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.surrogate import denoising_error, surrogate
from lit_vgrpo.objectives.base import Objective, group_layout
from lit_vgrpo.objectives.pairs import predict_pairs, rollout_pairs
from lit_vgrpo.policies.base import Policy


class ImageSource(Protocol):
    """Gives the images to learn from, and the captions to learn them under."""

    def __call__(
        self, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]], generators: Sequence[torch.Generator]
    ) -> tuple[Tensor, list[str]]:
        """Images ``(B, 3, H, W)`` float32 in [0, 1] and B captions; all randomness from the B generators."""


@checked
class Denoising(Objective):
    """The ELBO of images that are given: how the tiny models are pre-trained.

    Args:
        images: where images and captions come from.
        rollout: how held-out images are sampled.
        num_mc_samples: pairs (t, eps) an image.
        space: where the denoising error is measured.
        self_normalise: divide each squared error by its own detached absolute error.
        time_shift: resolution shift of the continuous schedule, from which times are drawn.
    """

    needs_reward: ClassVar[bool] = False

    def __init__(
        self,
        images: ImageSource,
        rollout: RolloutSpec | None = None,
        num_mc_samples: Annotated[int, Range(1, 1000, example=4)] = 1,
        space: Space = "v",
        self_normalise: bool = False,
        time_shift: PositiveFloat = 1.0,
    ) -> None:
        super().__init__()
        self.images = images
        self.rollout = rollout or RolloutSpec()
        self.num_mc_samples = num_mc_samples
        self.space = space
        self.self_normalise = self_normalise
        self.time_shift = time_shift

    def rollout_spec(self, iteration: int) -> RolloutSpec:
        return self.rollout

    def passes_per_image(self, sizes: Sizes, policy: Policy | None = None) -> dict[str, int]:
        return self.prediction_passes(sizes)

    def prediction_passes(self, sizes: Sizes) -> dict[str, int]:
        return {"update": sizes.uses_per_image * self.num_mc_samples}

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
        members: Sequence[int] | None = None,
        on_batch: BatchHook | None = None,
    ) -> Rollout:
        group_rows, image_ids = group_layout(slots, group_size, members)
        picked = group_rows.tolist()
        generators = image_generators(STREAM_DATA, seed, iteration, image_ids.tolist())
        images, captions = self.images([prompts[i] for i in picked], [rows[i] for i in picked], generators)
        conditioning, rows_of_captions = policy.encode_each(captions)
        return Rollout(
            latents=policy.encode_images(images),
            group_ids=torch.tensor(slots)[group_rows],
            image_ids=image_ids,
            conditioning=conditioning,
            rows=rows_of_captions,
            schedule=torch.empty(0),
            iteration=iteration,
            seed=seed,
            group_size=group_size,
        )

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
        pairs = rollout_pairs(
            policy,
            rollout,
            self.num_mc_samples,
            shared=False,
            stratified=True,
            times="uniform",
            shift=self.time_shift,
        )
        return Experience.of(rollout, advantages, pairs)

    def loss(self, policy: Policy, micro: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        _, error, _ = predict_pairs(policy, micro, self.space, None, guidance=1.0)
        elbo = surrogate(denoising_error(error, self.self_normalise))
        return elbo.mean(), {"surrogate": elbo.detach()}
