"""The tiny task: pictures of shapes, and small diffusers pipelines to learn them with."""
