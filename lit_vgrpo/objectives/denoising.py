"""Denoising pre-training: the surrogate itself as the loss, on given images instead of rollouts."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

import torch
from torch import Tensor

from lit_vgrpo.core.noise import STREAM_DATA, image_generators
from lit_vgrpo.core.pictures import references_of
from lit_vgrpo.core.probability_paths import Space
from lit_vgrpo.core.ranges import Range, checked
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.surrogate import ContinuousTimes, denoising_error, surrogate
from lit_vgrpo.core.types import Experience, Rollout, RolloutRequest, RolloutSpec
from lit_vgrpo.objectives.base import Metrics, Objective, PrepareContext
from lit_vgrpo.objectives.pairs import PairPass, draw_pairs
from lit_vgrpo.policies.base import Policy


class ImageSource(Protocol):
    """Source of training images and their captions."""

    def __call__(
        self, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]], generators: Sequence[torch.Generator]
    ) -> tuple[Tensor, list[str]]:
        """Return images ``(B, 3, H, W)``, float32 in [0, 1], and B captions; all randomness is in the generators."""


@checked
@dataclass(eq=False)
class Denoising(Objective):
    """The ELBO of given images, with which the tiny models are pre-trained.

    Args:
        images: Source of the images and captions.
        rollout: Sampling of held-out images.
        num_mc_samples: Pairs (t, eps) per image.
        space: Space of the denoising error.
    """

    needs_reward: ClassVar[bool] = False
    default_rollout: ClassVar[RolloutSpec] = RolloutSpec()

    images: ImageSource
    rollout: RolloutSpec | None = None
    num_mc_samples: Annotated[int, Range(1, 1000)] = 1
    space: Space = "v"

    def passes_per_image(self, sizes: Sizes, policy: Policy | None = None) -> dict[str, float]:
        return self.prediction_passes(sizes)  # without a rollout

    def predictions_per_image(self, sizes: Sizes) -> float:
        return self.num_mc_samples

    def rollout_batches(self, policy: Policy, request: RolloutRequest) -> Generator[Rollout, None, None]:
        """Return the given images instead of a rollout's."""
        group_rows, image_ids = request.layout()
        picked = group_rows.tolist()
        generators = image_generators(STREAM_DATA, request.seed, request.iteration, image_ids.tolist())
        prompts, rows = [request.prompts[i] for i in picked], [request.rows[i] for i in picked]
        images, captions = self.images(prompts, rows, generators)
        conditioning, rows_of_captions = policy.encode_each(captions, references_of(rows))
        yield Rollout(
            latents=policy.encode_images(images),
            group_ids=torch.tensor(request.slots)[group_rows],
            image_ids=image_ids,
            conditioning=conditioning,
            rows=rows_of_captions,
            schedule=torch.empty(0),
            iteration=request.iteration,
            seed=request.seed,
            group_size=request.group_size,
        )

    def make_experience(self, context: PrepareContext) -> Experience:
        return context.experience(draw_pairs(context, ContinuousTimes(), self.num_mc_samples, "none"))

    def forward(self, policy: Policy, micro: Experience, guidance: float) -> PairPass:
        return PairPass(policy, micro, self.space)

    def losses(self, now: PairPass, kept: Mapping[str, Tensor], micro: Experience) -> tuple[Tensor, Metrics]:
        elbo = surrogate(denoising_error(now.error, self_normalised=False))
        return elbo, {"surrogate": elbo.detach()}
