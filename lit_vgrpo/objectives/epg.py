"""EPG and PEPG (arXiv 2602.04663): the policy gradient, with the ELBO of the final image as its log-likelihood."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from lit_vgrpo.core.advantages import AdvantageStd
from lit_vgrpo.core.ranges import Range, checked
from lit_vgrpo.core.surrogate import denoising_error, surrogate
from lit_vgrpo.core.types import Experience
from lit_vgrpo.objectives.base import Copy, Metrics
from lit_vgrpo.objectives.nft import SlowSampler
from lit_vgrpo.objectives.pairs import PairPass


def exact_policy_gradient(log_p: Tensor, old_log_p: Tensor, advantages: Tensor, proximal: bool) -> Tensor:
    """Return ``-sg(rho) A log p``, or ``-sg(rho (A - log rho)) log p`` if ``proximal``, to be minimised; ``(B, N)``.

    Source: the public code of arXiv 2602.04663 (methods ``epg`` and ``pepg``).

    Args:
        log_p: Log-likelihood of one image at one time, ``(B, N)``; carries grad.
        old_log_p: The same under the policy that rolled out; ``rho = p / p_old``.
        advantages: ``A``, ``(B,)``.
        proximal: PEPG, with the gradient of the reward minus the KL to the policy that rolled out.
    """
    log_ratio = log_p.detach() - old_log_p
    gain = advantages[:, None] - log_ratio if proximal else advantages[:, None]
    return -(log_ratio.exp() * gain * log_p)


@checked
@dataclass(eq=False)
class EPG(SlowSampler):
    """EPG (exact policy gradient) and PEPG, its proximal form: no clip, and a separate ELBO for each time.

    ``log p_it = -m(e^2) / sg(m(|e|))`` with ``e = x_hat_theta - x``, V-GRPO's self-normalised error in x. Images come
    from a slowly moving copy, and are trained at the sampler's times, as in DiffusionNFT. On a rectified flow this
    is the paper's method; variance-preserving paths are our extension, as for DiffusionNFT.

    The old log-likelihoods are kept for a whole iteration, one number per image and time; the reference's
    predictions are as large as the latents times the number of times.

    Args:
        proximal: PEPG instead of EPG; they are equal while the policy is the one that rolled out. The public code's
            third method, PAR, with the loss ``sg(rho) (A - log rho)^2 / 2``, has the gradient of PEPG.
        advantage_scale: Divisor of the advantages: the public code uses ``0.1 (R - mean)``, not divided by any std
            (``model.advantage_std: none``, the default here). With a single update and EPG, Adam cancels most of it;
            in PEPG it limits how far the policy may move.

    The other options are those of :class:`~lit_vgrpo.objectives.nft.SlowSampler` and
    :class:`~lit_vgrpo.objectives.pairs.PairObjective`. ``old_decay`` and ``kl_weight`` are those of the public code's
    GenEval runs, which sample 10 steps of a second-order solver without guidance.
    """

    advantage_std: ClassVar[AdvantageStd] = "none"

    proximal: bool = False
    advantage_scale: Annotated[float, Range(above=0)] = 10.0

    def log_p(self, now: PairPass) -> Tensor:
        """Return the log-likelihood of each image at each time, ``(M, N)``."""
        return -denoising_error(now.error, self_normalised=True)

    def copies_needed(self) -> dict[str, Copy]:
        return super().copies_needed() | {"old": Copy({"old": self.log_p}, decay=self.old_decay, samples_from=0)}

    def losses(self, now: PairPass, kept: Mapping[str, Tensor], micro: Experience) -> tuple[Tensor, Metrics]:
        log_p, advantages = self.log_p(now), micro.advantages / self.advantage_scale
        metrics = {
            "surrogate": surrogate(-log_p.detach()),
            "ratio_deviation": surrogate(((log_p.detach() - kept["old"]).exp() - 1).abs()),
        }
        return surrogate(exact_policy_gradient(log_p, kept["old"], advantages, self.proximal)), metrics
