"""The tiny tasks: rendered shapes and words, and real small pipelines to learn them."""

from lit_vgrpo.tiny.shapes import ShapesImages
from lit_vgrpo.tiny.words import WordImages

__all__ = ["ShapesImages", "WordImages"]
