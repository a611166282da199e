"""DDPO (arXiv 2305.13301): policy gradient over the DDIM chain of a variance-preserving network."""

from dataclasses import dataclass
from typing import ClassVar

from lit_vgrpo.core.advantages import AdvantageStd
from lit_vgrpo.core.ranges import checked
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives.chain import ChainObjective


@checked
@dataclass(eq=False)
class DDPO(ChainObjective):
    """DDPO with clipped importance ratios, for eps- and v-networks: the chain is DDIM with eta 1.

    Advantages are divided by the group's std, as by the paper's per-prompt statistics. Our schedule ends at the clean
    latent, so the last step has no noise and no likelihood: all others are trained. The paper has no KL.
    The options are those of :class:`~lit_vgrpo.objectives.chain.ChainObjective`.
    """

    advantage_std: ClassVar[AdvantageStd] = "group"
    path_kinds: ClassVar[tuple[str, ...]] = ("vp",)
    default_rollout: ClassVar[RolloutSpec] = RolloutSpec("ddim_sde", steps=50, guidance=5.0)
