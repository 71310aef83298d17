"""A model as the modules of its layers, and of its two ends."""

import functools as ft
import itertools as it
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ..data import Layout, Model, Training
from .modules import (
    AbstractModule,
    Parameters,
    Projection,
    make_module,
    norm_parameters,
)


class Part(NamedTuple):
    """A layer, or an end of the model.

    **Attributes:**

    - `modules`: its modules, in order.
    - `is_layer`: whether it is a layer, which stages count and may recompute.
    - `sequence_length`: its sequence length, if it is not that of the training.
    - `words`: how many embedding matrices it has besides those of its modules: one if it has a copy
        of another rank's, minus one if a head uses the matrix of an earlier module.
    """

    modules: tuple[AbstractModule, ...]
    is_layer: bool = True
    sequence_length: int | None = None
    words: int = 0

    def parameters(self, model: Model) -> Parameters:
        """The parameters of its modules and their norms."""
        total = Parameters()
        for module in self.modules:
            total = total.plus(module.parameters(model))
        norms = sum(module.in_residual for module in self.modules) * norm_parameters(model)
        words = self.words * model.vocab_size * model.hidden_size
        return total.plus(Parameters(words, copied=norms))


Parts = tuple[tuple[Part, int], ...]  # Each part with how often it occurs, in order.

_PROJECTION = Part((Projection(),), is_layer=False)


def ends_of(model: Model) -> tuple[Part, Part]:
    """The parts before and after all layers.

    **Raises:**

    As `layers_of`.
    """
    first, last = (Part((make_module(model, end),), False) for end in (model.first, model.last))
    return first, last


def layers_of(model: Model) -> tuple[Part, ...]:
    """All layers of a model, in order.

    **Raises:**

    A `ValueError` of one sentence where a module of it is not known or lacks a key.
    """
    make = ft.cache(ft.partial(make_module, model))
    if model.layers is None:
        return (Part((make("attention"), make("mlp"))),) * model.num_layers
    found: list[Part] = []
    for layer in model.layers:
        part = Part(tuple(map(make, layer.modules)), sequence_length=layer.sequence_length)
        found += [part] * layer.repeat
    return tuple(
        part._replace(modules=tuple(one.of_layer(number) for one in part.modules))
        for number, part in enumerate(found)
    )


def reads_words_last(model: Model) -> bool:
    """Whether the last stage needs the embedding's matrix: for a tied head, or for
    multi-token-prediction layers, which read the next tokens.
    """
    return model.vocab_size > 0 and (model.tied_embeddings or model.num_mtp_layers > 0)


def parts_of_stages(model: Model, layers: Sequence[int], apart: bool) -> tuple[Parts, ...]:
    """The parts of each stage, if the stages have these numbers of layers. The ends are on the
    outer stages; `apart` says whether these are on different ranks.

    Consecutive equal layers become one part with their number.
    """
    first, last = ends_of(model)
    head = last._replace(words=int(apart and reads_words_last(model)))
    again = last._replace(words=int(model.tied_embeddings) - 1)
    every = layers_of(model)
    stages: list[Parts] = []
    begin = 0
    for stage, count in enumerate(layers):
        runs = it.groupby(every[begin : begin + count])
        parts = [(part, len(list(equal))) for part, equal in runs]
        begin += count
        if stage == 0:
            parts.insert(0, (first, 1))
        if stage == len(layers) - 1:
            parts.append((head, 1))
            parts += [(_PROJECTION, 1), (every[-1], 1), (again, 1)] * model.num_mtp_layers
        stages.append(tuple(parts))
    return tuple(stages)


class Recomputed(NamedTuple):
    """Equal parts of a stage, and whether the backward recomputes all of them."""

    part: Part
    count: int
    again: bool


def recomputed(parts: Parts, training: Training) -> tuple[Recomputed, ...]:
    """The parts of a stage, and which of them are recomputed: all layers, or its first ones."""
    left = 0
    if training.recompute == "full":
        layers = sum(count for part, count in parts if part.is_layer)
        left = min(layers, training.recompute_layers)
        left = left if training.recompute_method == "block" else layers
    found = []
    for part, count in parts:
        again = min(left, count) if part.is_layer else 0
        left -= again
        found += [Recomputed(part, again, True)] * (again > 0)
        found += [Recomputed(part, count - again, False)] * (count > again or not again)
    return tuple(found)


def total_parameters(model: Model, parts: Parts) -> Parameters:
    """The parameters of a stage."""
    total = Parameters()
    for part, count in parts:
        total = total.plus(part.parameters(model), count)
    return total


def count_parameters(model: Model) -> int:
    """The number of parameters of a model. A tied head counts once; multi-token-prediction layers
    do not count.

    **Raises:**

    A `ValueError` of one sentence where a module of it is not known or lacks a key.
    """
    layers = Counter(layers_of(model)).items()
    first, last = ends_of(model)
    parts = ((first, 1), *layers, (last, 1))
    return total_parameters(model, parts).total


def check_modules(model: Model, layout: Layout, training: Training) -> None:
    """Raises a `ValueError` of one sentence if a layout does not fit a module of a model."""
    modules = _modules(model)
    if layout.ep != 1 and not (has_experts(model) or has_tables(model)):
        raise ValueError(
            f"`layout.ep` is {layout.ep}, but the model is dense and has no experts; use `ep = 1`."
        )
    for module in modules:
        module.check(model, layout, training)


def has_experts(model: Model) -> bool:
    """Whether some layer of a model has experts."""
    return any(module.parameters(model).experts for module in _modules(model))


def has_tables(model: Model) -> bool:
    """Whether GPUs share embedding tables of a model, as in recommenders."""
    return any(module.parameters(model).tables for module in _modules(model))


def _modules(model: Model) -> dict[AbstractModule, None]:
    """The modules of all layers and of both ends, each once."""
    parts = (*layers_of(model), *ends_of(model))
    return dict.fromkeys(module for part in parts for module in part.modules)
