"""The tiny task: rendered shapes, and real small pipelines to learn them."""

from lit_vgrpo.tiny.shapes import ShapesImages

__all__ = ["ShapesImages"]
