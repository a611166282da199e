"""A weighted mixture of prompt sources."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from lit_vgrpo.data.rows import Row, Rows
from lit_vgrpo.data.sampler import prompt_index
from lit_vgrpo.data.tables import StreamedRows


def place_in_mixture(position: int, weights: Sequence[int]) -> tuple[int, int]:
    """Return the source for a position in the endless prompt sequence, and how many earlier positions it had.

    Sources are split in halves recursively; each half gets its rounded share of the positions. Any prefix is therefore
    within half a position per split of the exact shares, without keeping state.

    >>> [place_in_mixture(position, [3, 1])[0] for position in range(8)]
    [0, 0, 1, 0, 0, 0, 1, 0]

    Args:
        position: from 0.
        weights: shares as whole numbers, see :func:`whole_weights`.
    """
    first, last = 0, len(weights)
    while last - first > 1:
        middle = (first + last) // 2
        part, whole = sum(weights[first:middle]), sum(weights[first:last])
        before, after = ((2 * n * part + whole) // (2 * whole) for n in (position, position + 1))
        if after > before:
            position, last = before, middle
        else:
            position, first = position - before, middle
    return first, position


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Convert the weights to whole numbers in exactly the same ratio.

    >>> whole_weights([0.1, 1, 2.5])
    [1, 10, 25]
    """
    shares = [Fraction(repr(weight)) for weight in weights]
    common = math.lcm(*(share.denominator for share in shares))
    whole = [int(share * common) for share in shares]
    return [share // math.gcd(*whole) for share in whole]


class PromptMixture:
    """A mixture of training prompt sources, each shuffled and repeated on its own.

    Args:
        sources: their rows.
        weights: their shares; equal by default.
    """

    def __init__(self, sources: Sequence[Sequence[Row] | StreamedRows], weights: Sequence[float] | None = None) -> None:
        self.sources = sources
        self.weights = whole_weights(weights if weights is not None else [1.0] * len(sources))

    def rows(self, seed: int, positions: Sequence[int]) -> Rows:
        """Return the rows at positions of the endless prompt sequence: a pure function of seed and position.

        Args:
            seed: seed of the order; a stream has its own.
            positions: in ascending order.
        """
        return [self._row(seed, *place_in_mixture(position, self.weights)) for position in positions]

    def _row(self, seed: int, number: int, position: int) -> Row:
        source = self.sources[number]
        if isinstance(source, StreamedRows):
            return source.at(position)
        return source[prompt_index(seed, position, len(source), number)]
