"""Entries of several figures, distributed over tiles of one figure each."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from ..replica import Batch, tile_size, tiles


class Packed(NamedTuple):
    """Entries of several figures in tiles, so that each tile has entries of one figure only.

    **Attributes:**

    - `entries`: the entry at each place, or -1 for none.
    - `figure`: the figure of each tile.
    - `size`: of a tile.
    """

    entries: np.ndarray
    figure: np.ndarray
    size: int

    def pieces(self, number: int) -> Iterator["Packed"]:
        """The same, at most so many entries at a time."""
        for start in range(0, len(self.entries), number):
            tiles_ = slice(start // self.size, (start + number) // self.size)
            yield Packed(self.entries[start : start + number], self.figure[tiles_], self.size)

    def tiles(self, function, shared, inputs, *, per_batch: int) -> Iterator[Batch]:
        options: dict[str, Any] = {"per_batch": per_batch, "size": self.size}
        return tiles(function, shared, len(self.entries), inputs, **options)

    def add(self, sums: Any, of_tiles: Any, first: int = 0) -> None:
        """Adds the sums of tiles, from an entry on, to those of their figures."""

        def add(total, of_tiles):
            start = first // self.size
            np.add.at(total, self.figure[start : start + len(of_tiles)], of_tiles)

        jax.tree.map(add, sums, of_tiles)


def packed_of(figure: np.ndarray, figures: int) -> Packed:
    """See [`Packed`][]; `figure` is that of each entry, ascending."""
    number, size = np.bincount(figure, minlength=figures), tile_size(len(figure) // figures)
    in_tiles = -(-number // size)
    of_tile = np.repeat(np.arange(figures), in_tiles)
    start = size * (np.cumsum(in_tiles) - in_tiles) - (np.cumsum(number) - number)
    entries = np.full(len(of_tile) * size, -1)
    entries[np.arange(len(figure)) + start[figure]] = np.arange(len(figure))
    return Packed(entries, of_tile, size)
