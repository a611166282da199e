"""DDPO (arXiv 2305.13301): policy gradient over the DDIM chain of a variance-preserving network."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from lit_vgrpo.core.advantages import AdvantageStd
from lit_vgrpo.core.ranges import GuidanceScale, NonNegativeFloat, Range, checked
from lit_vgrpo.core.rollout import RolloutSpec
from lit_vgrpo.objectives.chain import ChainObjective


@checked
@dataclass(eq=False)
class DDPO(ChainObjective):
    """DDPO with clipped importance ratios, for eps- and v-networks: the chain is DDIM with eta 1.

    Advantages are divided by the group's std, as by the paper's per-prompt statistics. Our schedule ends at the clean
    latent, where the last step has no noise and so no likelihood: all steps but that one are trained.

    Args:
        rollout: how images are sampled; null is ddim_sde with 50 steps and guidance 5.
        clip: half-width of the ratio's trust region; null for none.
        advantage_clip: bound on the advantages; null for none.
        kl_weight: weight of the KL of each step to the weights of the start; the paper has none.
        training_guidance: guidance of the network while it is trained; null takes the rollout's.
        recompute_old: see :class:`~lit_vgrpo.objectives.chain.ChainObjective`.
        reference_guidance: guidance of the start's weights; null takes the training's.
    """

    advantage_std: ClassVar[AdvantageStd] = "group"
    path_kinds: ClassVar[tuple[str, ...]] = ("vp",)

    rollout: RolloutSpec | None = None
    clip: Annotated[float, Range(above=0, below=1, example=1e-4)] | None = 1e-4
    advantage_clip: Annotated[float, Range(above=0, example=5)] | None = 5.0
    kl_weight: NonNegativeFloat = 0.0
    reference_guidance: GuidanceScale | None = None
    training_guidance: GuidanceScale | None = None
    recompute_old: bool = False

    def __post_init__(self) -> None:
        self.rollout = self.rollout or RolloutSpec("ddim_sde", steps=50, guidance=5.0)
        super().__post_init__()
