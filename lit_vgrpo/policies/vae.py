"""How the VAE works."""

from __future__ import annotations

from typing import Any

from lit_vgrpo.hub import LoadError


def save_memory(vae: Any, *, slicing: bool, tiling: bool) -> None:
    """Let a VAE take one image at a time, and large ones in overlapping tiles.

    Raises:
        LoadError: this VAE cannot do so.
    """
    for wanted, option, method in ((slicing, "vae_slicing", "enable_slicing"), (tiling, "vae_tiling", "enable_tiling")):
        if not wanted:
            continue
        try:
            getattr(vae, method)()
        except (AttributeError, NotImplementedError):
            raise LoadError(f"model.policy.{option}=true: {type(vae).__name__} cannot do so. Leave it out.") from None
