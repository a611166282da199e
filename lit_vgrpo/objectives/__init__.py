"""Training methods, one file each."""

from lit_vgrpo.objectives.base import Objective
from lit_vgrpo.objectives.denoising import Denoising, ImageSource
from lit_vgrpo.objectives.vgrpo import VGRPO, clipped_surrogate

__all__ = ["VGRPO", "Denoising", "ImageSource", "Objective", "clipped_surrogate"]
