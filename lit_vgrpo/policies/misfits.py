"""What a pipeline's configurations say against training it, though its class is right: phrases that follow its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any] | None

FLOW_SCHEDULER = "FlowMatchEulerDiscreteScheduler"
DISTILLED = ("LCMScheduler", "TCDScheduler")
TURBO = "EulerAncestralDiscreteScheduler"
"""With trailing steps, the scheduler that SD-Turbo and SDXL-Turbo come with; nothing else of theirs tells."""


def channels_misfit(name: str, network: Config, vae: Config, packed: int = 1) -> str | None:
    """Refuse a network that takes more than noisy latents, such as a mask or an image to edit.

    Args:
        name: the network's in the pipeline.
        packed: latents that make one of the network's inputs.
    """
    taken, made = (network or {}).get("in_channels"), (vae or {}).get("latent_channels")
    if taken is None or made is None or taken == packed * made:
        return None
    return (
        f"is no text-to-image model: its {name} takes {taken} channels and its VAE makes {packed * made}, as of models "
        "that fill in, edit or follow a picture. Give the model that it was made from."
    )


def flow_misfit(scheduler: Config) -> str | None:
    """Refuse a scheduler with an unknown shift of the sigmas, or one that draws noise at every step."""
    kind = (scheduler or {}).get("_class_name")
    if kind is not None and kind != FLOW_SCHEDULER:
        return f"comes with {kind}: a rectified flow here has {FLOW_SCHEDULER}. Save the pipeline with that."
    if (scheduler or {}).get("stochastic_sampling"):
        return "has a scheduler with stochastic_sampling: true, as distilled models have. Give another model."
    return None


def noise_misfit(scheduler: Config, predictions: tuple[str, ...], policy: str) -> str | None:
    """Refuse a noise schedule or prediction type that is not of the variance-preserving path.

    Args:
        predictions: what the network may predict, by the schedulers' names.
        policy: the class that says so, for the message.
    """
    config = scheduler or {}
    kind, prediction = config.get("_class_name", ""), config.get("prediction_type", predictions[0])
    if kind.startswith(("EDM", "FlowMatch")):
        return f"comes with {kind}: it was trained on another noise schedule than {policy}'s. Give a model with betas."
    if prediction not in predictions:
        return f"predicts {prediction!r}. {policy} takes {' or '.join(predictions)}."
    if prediction == "epsilon" and config.get("rescale_betas_zero_snr"):
        return (
            "predicts epsilon on a schedule that ends in pure noise (rescale_betas_zero_snr), where that says nothing "
            "of the picture. Set one of the two otherwise in its scheduler folder."
        )
    return None


def distillation(scheduler: Config) -> str | None:
    """Return what tells that a network on the variance-preserving path was distilled to a few steps, or ``None``."""
    config = scheduler or {}
    kind = config.get("_class_name")
    if kind in DISTILLED:
        return str(kind)
    return f"{kind}, trailing" if kind == TURBO and config.get("timestep_spacing") == "trailing" else None
