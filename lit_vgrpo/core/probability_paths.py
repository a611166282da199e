"""Probability paths ``z_t = a_t x + b_t eps`` and the conversions between a network's predictions.

Times are float32 in [0, 1], 1 = pure noise; a scheduler's or network's units are not used here. All functions are pure
and take ``t`` of shape ``(B,)`` with latents of shape ``(B, ...)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from lit_vgrpo.core.ranges import PositiveInt, checked

Space = Literal["x", "eps", "v"]


def expand(values: Tensor, like: Tensor) -> Tensor:
    """Give ``values``, such as ``(B,)`` or ``(B, N)``, trailing dimensions of 1, to broadcast against ``like``."""
    return values.reshape(*values.shape, *[1] * (like.ndim - values.ndim))


class ProbabilityPath(ABC):
    """A Gaussian path from clean latents to noise, with the network's prediction target."""

    prediction: Space

    @abstractmethod
    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(a_t, b_t)``, each of the shape of ``t``, float32."""

    @abstractmethod
    def snap(self, t: Tensor) -> Tensor:
        """Return the time nearest to ``t`` that the network sees unchanged, at which pairs are trained."""

    @abstractmethod
    def target(self, x: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """Return the prediction of a perfect network at ``z_t``; shape of ``x``."""

    @abstractmethod
    def to_x(self, prediction: Tensor, z: Tensor, t: Tensor) -> Tensor:
        """Return the clean-latent estimate ``x_hat`` from the network's prediction at ``z``."""

    @abstractmethod
    def to_eps(self, prediction: Tensor, z: Tensor, t: Tensor) -> Tensor:
        """Return the noise estimate ``eps_hat`` from the network's prediction at ``z``."""

    @abstractmethod
    def to_v(self, prediction: Tensor, z: Tensor, t: Tensor) -> Tensor:
        """Return the velocity estimate from the network's prediction at ``z``."""

    def error_scale(self, space: Space, t: Tensor, cap: float | None = None) -> Tensor:
        """Return the positive factor ``(B,)`` that converts an error of the prediction to one in ``space``.

        Every conversion is linear in the prediction at a fixed ``z_t``, so the error in another space is the
        prediction's error times this factor (up to its sign). ``cap`` bounds factors that diverge.
        """
        a, b = self.coefficients(t)
        if self.prediction == "eps":
            scale = {"x": b / a, "eps": torch.ones_like(b), "v": 1 / a}[space]
        else:
            scale = {"x": b, "eps": a, "v": torch.ones_like(b)}[space]
        return scale if cap is None else scale.clamp(max=cap)

    def interpolate(self, x: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """Return ``z_t = a_t x + b_t eps`` in float32; shapes ``(B, ...)``."""
        a, b = self.coefficients(t)
        return expand(a, x) * x.float() + expand(b, x) * eps.float()


@checked
class RectifiedFlow(ProbabilityPath):
    """``a = 1 - t``, ``b = t``; the network predicts the velocity ``v = eps - x`` (SD3, FLUX).

    A network that multiplies times by ``time_scale`` in ``time_dtype`` rounds them: in bfloat16 it sees 0.9 as 0.8984.
    """

    prediction: Space = "v"

    def __init__(self, time_dtype: torch.dtype = torch.float32, time_scale: PositiveInt = 1) -> None:
        self.time_dtype, self.time_scale = time_dtype, time_scale

    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor]:
        t = t.float()
        return 1 - t, t

    def snap(self, t: Tensor) -> Tensor:
        if self.time_dtype == torch.float32:
            return t
        return (t.to(self.time_dtype) * self.time_scale).float() / self.time_scale

    def target(self, x: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        return eps.float() - x.float()

    def to_x(self, prediction: Tensor, z: Tensor, t: Tensor) -> Tensor:
        return z - expand(t, z) * prediction

    def to_eps(self, prediction: Tensor, z: Tensor, t: Tensor) -> Tensor:
        return z + (1 - expand(t, z)) * prediction

    def to_v(self, prediction: Tensor, z: Tensor, t: Tensor) -> Tensor:
        return prediction


class VariancePreserving(ProbabilityPath):
    """``a = sqrt(abar)``, ``b = sqrt(1 - abar)`` on a discrete schedule (SD 1.5, SDXL; DDPM, arXiv 2006.11239).

    The discrete timestep ``k`` in ``0 .. T-1`` is represented as ``t = (k + 1) / T``, so that ``t = 0`` is the clean
    latent. The velocity is ``v = a eps - b x`` as in arXiv 2202.00512.

    Args:
        alphas_cumprod: The schedule's ``abar``, shape ``(T,)``.
        prediction: ``"eps"`` or ``"v"``.
    """

    def __init__(self, alphas_cumprod: Tensor, prediction: Space = "eps") -> None:
        if prediction not in ("eps", "v"):
            raise ValueError(f"prediction={prediction!r} is unknown on the variance-preserving path. Use eps or v.")
        self.prediction = prediction
        self.num_timesteps = len(alphas_cumprod)
        self.alphas_cumprod = torch.cat([torch.ones(1), alphas_cumprod.detach().float().cpu()])
        self._copies: dict[torch.device, Tensor] = {}

    def index(self, t: Tensor) -> Tensor:
        """Return the discrete timestep ``k`` of ``t``, int64; -1 stands for the clean latent."""
        return (t.double() * self.num_timesteps).round().long() - 1

    def time(self, k: Tensor) -> Tensor:
        """Return the inverse of :meth:`index`, float32."""
        return ((k.double() + 1) / self.num_timesteps).float()

    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor]:
        if t.device not in self._copies:  # copied once, not at each of a sampler's steps
            with torch.inference_mode(False):  # the first to ask may be an evaluation, the next a training step
                self._copies[t.device] = self.alphas_cumprod.to(t.device)
        abar = self._copies[t.device][self.index(t) + 1]
        return abar.sqrt(), (1 - abar).sqrt()

    def snap(self, t: Tensor) -> Tensor:
        return self.time(self.index(t).clamp(min=0))

    def target(self, x: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        if self.prediction == "eps":
            return eps.float()
        a, b = self.coefficients(t)
        return expand(a, x) * eps.float() - expand(b, x) * x.float()

    def to_x(self, prediction: Tensor, z: Tensor, t: Tensor) -> Tensor:
        a, b = (expand(c, z) for c in self.coefficients(t))
        return (z - b * prediction) / a if self.prediction == "eps" else a * z - b * prediction

    def to_eps(self, prediction: Tensor, z: Tensor, t: Tensor) -> Tensor:
        a, b = (expand(c, z) for c in self.coefficients(t))
        return prediction if self.prediction == "eps" else b * z + a * prediction

    def to_v(self, prediction: Tensor, z: Tensor, t: Tensor) -> Tensor:
        if self.prediction == "v":
            return prediction
        a, b = (expand(c, z) for c in self.coefficients(t))
        return (prediction - b * z) / a
