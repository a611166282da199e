"""The small network with which ImageReward and the LAION predictor turn an embedding into a score."""

from __future__ import annotations

from torch import Tensor, nn

WIDTHS = (1024, 128, 64, 16, 1)


class ScoreHead(nn.Module):
    """Linear layers only: both originals have their activations commented out.

    The places of the originals' dropout are kept, since they number the weights: ``layers.0, 2, 4, 6, 7``.

    Args:
        width: of the embedding.

    Source:
        github.com/christophschuhmann/improved-aesthetic-predictor, simple_inference.py; taken over by
        github.com/THUDM/ImageReward, ImageReward.py.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        first, second, third, fourth, last = (
            nn.Linear(*widths) for widths in zip((width, *WIDTHS), WIDTHS, strict=False)
        )
        self.layers = nn.Sequential(first, nn.Identity(), second, nn.Identity(), third, nn.Identity(), fourth, last)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Scores ``(b,)`` of embeddings ``(b, width)``, float32."""
        scores: Tensor = self.layers(embeddings.float())
        return scores.squeeze(-1)
