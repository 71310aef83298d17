"""Layers over stages so that the stage with most work has as little as possible."""

import numpy as np

from .._misc import bisect
from ..data import Model
from ._architecture import Part, ends_of, layers_of


# So many halvings find the least work of the fullest stage to the last digit.
_HALVINGS = 50


def balanced_layers(model: Model, stages: int) -> tuple[int, ...]:
    """The number of layers of each stage, by the parameters at work in a layer. The head, and
    layers of multi-token prediction, count for the last stage.
    """
    layers = np.array([_at_work(model, part) for part in layers_of(model)])
    head = _at_work(model, ends_of(model)[1])
    last = head + model.num_mtp_layers * (layers[-1] + head)
    enough = 2 * (float(np.sum(layers)) + last)
    _, most = bisect(lambda most: not _fills(layers, last, stages, most), 0.0, enough, _HALVINGS)
    return _even(layers, last, stages, most * (1 + 1e-9))


def _at_work(model: Model, part: Part) -> float:
    """The parameters that a token passes through."""
    total = 0.0
    for module in part.modules:
        of = module.parameters(part.of_width(model))
        share = getattr(module, "top_k", 1) / getattr(module, "num_experts", 1)
        total += of.split + of.copied + share * of.experts
    return total


def _fills(layers: np.ndarray, last: float, stages: int, most: float) -> bool:
    """Whether all layers find a place if no stage may have more work."""
    begin = 0
    for stage in range(stages):
        room = most - last * (stage == stages - 1)
        if room < 0:
            return False
        begin += int(np.searchsorted(np.cumsum(layers[begin:]), room, side="right"))
    return begin == len(layers)


def _even(layers: np.ndarray, last: float, stages: int, most: float) -> tuple[int, ...]:
    """The number of layers of each stage with the least sum of squares of work."""
    ends = np.append(0.0, np.cumsum(layers))
    work = ends[None] - ends[:, None]  # Of a stage with the layers from one end to another.
    squares = np.where((work >= 0) & (work <= most), work**2, np.inf)
    with_last = np.where((work >= 0) & (work + last <= most), (work + last) ** 2, np.inf)
    best, choices = np.where(ends == 0, 0.0, np.inf), []
    for stage in range(stages):
        total = best[:, None] + (with_last if stage == stages - 1 else squares)
        choices.append(np.argmin(total, axis=0))
        best = np.min(total, axis=0)
    counts, end = [], len(layers)
    for choice in reversed(choices):
        counts.append(end - int(choice[end]))
        end = int(choice[end])
    return tuple(reversed(counts))
