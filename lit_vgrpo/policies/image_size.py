"""Which image sizes a model can take."""

from __future__ import annotations

from lit_vgrpo.hub import LoadError


def latent_side(name: str, pixels: int, vae_factor: int, patch_size: int) -> int:
    """The latents along a side of so many pixels.

    Args:
        name: ``height`` or ``width``, for the message.
        pixels: of that side.
        vae_factor: pixels of a latent.
        patch_size: latents of a patch, of which the network takes whole ones.

    Raises:
        LoadError: the side is no whole number of patches; names the nearest sizes that are.
    """
    multiple = vae_factor * patch_size
    if pixels < 1 or pixels % multiple:
        lower = max(0, pixels // multiple * multiple)
        sizes = f"{lower} or {lower + multiple}" if lower else str(multiple)
        raise LoadError(
            f"model.policy.{name}={pixels} is not a multiple of {multiple} (VAE factor x patch size). Use {sizes}."
        )
    return pixels // vae_factor


def refuse_above(name: str, pixels: int, most: int, why: str) -> None:
    """LoadError for a side longer than the network's positions reach."""
    if pixels > most:
        raise LoadError(f"model.policy.{name}={pixels} is more than {why} cover. Use {most} or less.")
