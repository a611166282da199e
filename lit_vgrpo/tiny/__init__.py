"""The tiny tasks: rendered shapes and words."""

from lit_vgrpo.tiny.shapes import ShapesImages, redness
from lit_vgrpo.tiny.words import WordImages

__all__ = ["ShapesImages", "WordImages", "redness"]
