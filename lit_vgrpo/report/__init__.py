"""The report of a run: what its folder holds, the verdict, the curves, the page and the model card."""
