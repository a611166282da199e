"""Reasons in a pipeline's configurations why it cannot be trained, as phrases that follow its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any] | None

FLOW_SCHEDULER = "FlowMatchEulerDiscreteScheduler"
DISTILLED = ("LCMScheduler", "TCDScheduler")
TURBO = "EulerAncestralDiscreteScheduler"
"""With trailing steps, the scheduler of SD-Turbo and SDXL-Turbo; nothing else in their files identifies them."""

DISTILLED_NAMES = re.compile(r"(?:^|[-_.])(schnell|turbo|lightning|lcm|hyper|distilled)(?=$|[-_.])", re.IGNORECASE)
"""Words in the names of distilled models whose files say nothing, such as SD 3.5 Large Turbo's and Z-Image-Turbo's."""


def channels_misfit(name: str, network: Config, vae: Config, packed: int = 1) -> str | None:
    """Refuse a network with inputs besides noisy latents, such as a mask or an image to edit.

    Args:
        name: the network's name in the pipeline.
        packed: latents per network input.
    """
    taken = (network or {}).get("in_channels")
    made = (vae or {}).get("latent_channels", (vae or {}).get("z_dim"))  # the latter in VAEs of video
    if taken is None or made is None or taken == packed * made:
        return None
    return (
        f"is not a text-to-image model: its {name} takes {taken} channels and its VAE has {packed * made}, as in "
        "models that inpaint, edit or follow an image. Use the model that it was made from."
    )


def flow_misfit(scheduler: Config) -> str | None:
    """Refuse a scheduler with an unknown shift of the sigmas, or one that adds noise at every step."""
    kind = (scheduler or {}).get("_class_name")
    if kind is not None and kind != FLOW_SCHEDULER:
        return f"comes with {kind}: a rectified flow needs {FLOW_SCHEDULER}. Save the pipeline with that."
    if (scheduler or {}).get("stochastic_sampling"):
        return "has a scheduler with stochastic_sampling: true, as in distilled models. Use another model."
    return None


def noise_misfit(scheduler: Config, predictions: tuple[str, ...], policy: str) -> str | None:
    """Refuse a noise schedule or prediction type that does not fit the variance-preserving path.

    Args:
        predictions: supported prediction types, by the schedulers' names.
        policy: the policy class's name, for the message.
    """
    config = scheduler or {}
    kind, prediction = config.get("_class_name", ""), config.get("prediction_type", predictions[0])
    if kind.startswith(("EDM", "FlowMatch")):
        return f"comes with {kind}: it was trained on another noise schedule than {policy}'s. Use a model with betas."
    if prediction not in predictions:
        return f"predicts {prediction!r}. {policy} supports {' or '.join(predictions)}."
    if prediction == "epsilon" and config.get("rescale_betas_zero_snr"):
        return (
            "predicts epsilon on a schedule that ends in pure noise (rescale_betas_zero_snr), where epsilon has no "
            "information about the image. Change one of the two in its scheduler folder."
        )
    return None


def distillation(scheduler: Config) -> str | None:
    """Return what suggests that a network on the variance-preserving path was distilled, or ``None``."""
    config = scheduler or {}
    kind = config.get("_class_name")
    if kind in DISTILLED:
        return str(kind)
    return f"{kind}, trailing" if kind == TURBO and config.get("timestep_spacing") == "trailing" else None
