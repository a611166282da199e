"""The VAE's memory options, and the image sizes that VAE and network support."""

from __future__ import annotations

from typing import Any

from lit_vgrpo.system.hub import LoadError


def save_memory(vae: Any, *, slicing: bool, tiling: bool) -> None:
    """Let a VAE process one image at a time, and large ones in overlapping tiles.

    Raises:
        LoadError: this VAE does not support it.
    """
    for wanted, option, method in ((slicing, "vae_slicing", "enable_slicing"), (tiling, "vae_tiling", "enable_tiling")):
        if not wanted:
            continue
        try:
            getattr(vae, method)()
        except (AttributeError, NotImplementedError):
            raise LoadError(
                f"model.policy.{option}=true: {type(vae).__name__} does not support it. Leave it out."
            ) from None


def latent_sides(height: int | None, width: int | None, default: int, vae_factor: int, patch_size: int) -> list[int]:
    """Return the number of latents along height and width, both given in pixels.

    Args:
        default: pixels of a side that is ``None``.
        vae_factor: pixels per latent.
        patch_size: latents per patch.

    Raises:
        LoadError: a side is not a whole number of patches; names the nearest sizes that are.
    """
    multiple, sides = vae_factor * patch_size, []
    for name, given in (("height", height), ("width", width)):
        pixels = default if given is None else given
        if pixels < 1 or pixels % multiple:
            lower = max(0, pixels // multiple * multiple)
            sizes = f"{lower} or {lower + multiple}" if lower else str(multiple)
            raise LoadError(
                f"model.policy.{name}={pixels} is not a multiple of {multiple} (VAE factor x patch size). Use {sizes}."
            )
        sides.append(pixels // vae_factor)
    return sides
