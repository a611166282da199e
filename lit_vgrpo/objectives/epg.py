"""EPG and PEPG (arXiv 2602.04663): the policy gradient, with the ELBO of the final image as its log-likelihood."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from lit_vgrpo.core.advantages import AdvantageStd
from lit_vgrpo.core.ranges import Range, checked
from lit_vgrpo.core.surrogate import denoising_error, surrogate
from lit_vgrpo.core.types import Experience
from lit_vgrpo.objectives.base import PrepareContext
from lit_vgrpo.objectives.forward import LaggedObjective
from lit_vgrpo.objectives.pairs import distance_to
from lit_vgrpo.policies.base import Policy


def exact_policy_gradient(log_p: Tensor, old_log_p: Tensor, advantages: Tensor, proximal: bool) -> Tensor:
    """Return ``-sg(rho) A log p``, or ``-sg(rho (A - log rho)) log p`` if ``proximal``, to be minimised.

    Args:
        log_p: Log-likelihood of one image at one time, ``(B, N)``; carries grad.
        old_log_p: The same under the policy that rolled out; ``rho = p / p_old``.
        advantages: ``A``, ``(B,)``.
        proximal: PEPG, with the gradient of the reward minus the KL to the policy that rolled out.

    Returns:
        Shape ``(B, N)``.

    Source:
        The public code of arXiv 2602.04663 (methods ``epg`` and ``pepg``).
    """
    log_ratio = log_p.detach() - old_log_p
    gain = advantages[:, None] - log_ratio if proximal else advantages[:, None]
    return -(log_ratio.exp() * gain * log_p)


@checked
@dataclass(eq=False)
class EPG(LaggedObjective):
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

    The other options are those of :class:`~lit_vgrpo.objectives.forward.LaggedObjective` and
    :class:`~lit_vgrpo.objectives.forward.ForwardObjective`; ``decay_type`` 1 and ``kl_weight`` 1e-4 are those of the
    public code's GenEval runs, which sample 10 steps of a second-order solver without guidance.
    """

    advantage_std: ClassVar[AdvantageStd] = "none"

    proximal: bool = False
    advantage_scale: Annotated[float, Range(above=0)] = 10.0

    @torch.no_grad()
    def store_old(self, context: PrepareContext, experience: Experience) -> None:
        micros = experience.micro_batches(context.micro_batch_size)
        each = [self._log_p(self.predict(context.policy, micro, "x", self.scale_cap)[1]) for micro in micros]
        experience.extras["old_log_p"] = torch.cat(each)

    def _log_p(self, error: Tensor) -> Tensor:
        return -denoising_error(error, self_normalised=True)

    def loss(self, policy: Policy, micro: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        prediction, error, _ = predicted = self.predict(policy, micro, "x", self.scale_cap)
        log_p = self._log_p(error)
        old_log_p = micro.extras.get("old_log_p", log_p.detach())
        advantages = micro.advantages / self.advantage_scale
        gradient = surrogate(exact_policy_gradient(log_p, old_log_p, advantages, self.proximal))
        distance = distance_to(micro, "reference", prediction)
        metrics = {
            "surrogate": surrogate(-log_p.detach()),
            "ratio_deviation": surrogate(((log_p.detach() - old_log_p).exp() - 1).abs()),
            "kl": distance.detach(),
        }
        return self.with_pulls((gradient + self.kl_weight * distance).mean(), metrics, micro, predicted)
