"""A model as the modules of its layers, and of its two ends; models of a number of parameters."""

import bisect
import functools as ft
import itertools as it
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from .._misc import whole_number
from ..data import Adapters, Layout, Model, Training
from ._costs import Costs
from ._residual import parameters_around
from .modules import (
    AbstractModule,
    Embedding,
    Head,
    Parameters,
    Projection,
    make_module,
)


# The sizes that grow with the width, and what they are multiples of.
_GROWING = {"ffn_size": 64, "expert_ffn_size": 64, "shared_ffn_size": 64, "inner_size": 64}
_GROWING |= {"mamba_num_heads": 8}
# Sizes that are the width, or follow from it, in ways that only the author of a model knows.
_TIED = ("tables", "layer_sizes", "width", "in_channels", "out_channels", "skip_channels")
_TIED += ("time_size",)
_STEP, _MOST_STEPS = 64, 2**16


class LayerPart(NamedTuple):
    """A layer, or an end of the model.

    **Attributes:**

    - `modules`: its modules, in order.
    - `is_layer`: whether it is a layer, which stages count and may recompute.
    - `sequence_length`, `hidden_size`: its sequence length, if it is not that of the training, and
        its width, if it is not that of the model.
    - `frozen`: whether it is not trained, and so runs forward only.
    - `adapters`: those that are trained instead of its own parameters.
    - `norms`: how many norms each of its modules has, if it is in a residual; if empty, one each.
    - `words`: how many embedding matrices it has besides those of its modules: one if it has a copy
        of another rank's, minus one if a head uses the matrix of an earlier module.
    """

    modules: tuple[AbstractModule, ...]
    is_layer: bool = True
    sequence_length: int | None = None
    hidden_size: int | None = None
    frozen: bool = False
    words: int = 0
    adapters: Adapters | None = None
    norms: tuple[int, ...] = ()

    @property
    def normed(self) -> list[tuple[AbstractModule, int]]:
        """Its modules, each with its number of norms."""
        return [*zip(self.modules, self.norms or it.repeat(1), strict=False)]

    def of_width(self, model: Model) -> Model:
        """The model with its width."""
        width = self.hidden_size
        return model if width is None else replace(model, hidden_size=width)

    def of_length(self, training: Training) -> Training:
        """The training with its sequence length."""
        length = self.sequence_length
        return training if length is None else replace(training, sequence_length=length)

    def costs(self, costs: Costs) -> Costs:
        """The costs with both."""
        sizes = {"model": self.of_width(costs.model), "training": self.of_length(costs.training)}
        return replace(costs, **sizes)

    def parameters(self, model: Model) -> Parameters:
        """The parameters that are trained: of its modules and their norms, or of adapters."""
        if self.frozen or self.adapters is None:
            return Parameters() if self.frozen else self.held(model)
        model, total = self.of_width(model), Parameters()
        for module in self.modules:
            for name, of_rank_one in module.adapted(model).items():
                if name in self.adapters.modules:
                    total = total.plus(of_rank_one, self.adapters.rank)
        return total

    def sharded(self, model: Model) -> Parameters:
        """The parameters that FSDP shards: also those that stay as they are beside adapters."""
        trained = self.parameters(model)
        return trained if self.adapters is None else trained.plus(self.held(model))

    def held(self, model: Model) -> Parameters:
        """The parameters of its modules and their norms, trained or not, without adapters."""
        model, total = self.of_width(model), Parameters()
        for module, norms in self.normed:
            total = total.plus(module.parameters(model))
            total = total.plus(parameters_around(model, module, norms))
        return total.plus(Parameters(self.words * model.vocab_size * model.hidden_size))


Parts = tuple[tuple[LayerPart, int], ...]  # Each part with how often it occurs, in order.

_PROJECTION = LayerPart((Projection(),), is_layer=False)


def ends_of(model: Model) -> tuple[LayerPart, LayerPart]:
    """The parts before and after all layers. `first` is frozen if the layers behind it are: no
    gradient comes back to it. A head that is tied to it then trains their matrix alone.

    **Raises:**

    As `layers_of`.
    """
    first, last = (
        LayerPart((make_module(model, end),), False) for end in (model.first, model.last)
    )
    if not _feeds_frozen(model):
        return first, last
    tied = model.vocab_size * model.tied_embeddings > 0 and isinstance(first.modules[0], Embedding)
    return first._replace(frozen=True, words=-int(tied)), last._replace(words=int(tied))


def _feeds_frozen(model: Model) -> bool:
    """Whether `first` is read by frozen layers. Those with a length or a width of their own, as an
    encoder of texts beside an image, have another input, which is not counted.
    """
    if not model.layers or not model.layers[0].frozen:
        return False
    behind = model.layers[0]
    return behind.sequence_length is None and behind.hidden_size in (None, model.hidden_size)


def layers_of(model: Model) -> tuple[LayerPart, ...]:
    """All layers of a model, in order.

    **Raises:**

    A `ValueError` of one sentence where a module of it is not known or lacks a key.
    """
    make = ft.cache(ft.partial(make_module, model))
    if model.layers is None:
        return (LayerPart((make("attention"), make("mlp"))),) * model.num_layers
    parts: list[LayerPart] = []
    for layer in model.layers:
        sizes = layer.sequence_length, layer.hidden_size, layer.frozen
        part = LayerPart(tuple(map(make, layer.modules)), True, *sizes, norms=layer.norms or ())
        parts += [part] * layer.repeat
    if any(after.frozen and not before.frozen for before, after in it.pairwise(parts)):
        raise ValueError(
            "`model.layers` has a frozen layer behind one that is trained, which needs gradients "
            "from it; put frozen layers first."
        )
    return tuple(
        part._replace(modules=tuple(module.of_layer(number) for module in part.modules))
        for number, part in enumerate(parts)
    )


def reads_words_last(model: Model) -> bool:
    """Whether the last stage needs the embedding's matrix: for a tied head, or for
    multi-token-prediction layers, which read the next tokens.
    """
    return model.vocab_size > 0 and (model.tied_embeddings or model.num_mtp_layers > 0)


def parts_of_stages(
    model: Model, layers: Sequence[int], apart: bool, adapters: Adapters | None = None
) -> tuple[Parts, ...]:
    """The parts of each stage, if the stages have these numbers of layers. The ends are on the
    outer stages; `apart` says whether these are on different ranks. No gradient goes back to the
    first end if `adapters` are trained.

    Consecutive equal layers become one part with their number.
    """
    first, last = ends_of(model)
    if apart:  # Each of the two stages has a matrix.
        first, last = first._replace(words=0), last._replace(words=int(reads_words_last(model)))
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
            parts.append((last, 1))
            parts += [(_PROJECTION, 1), (every[-1], 1), (again, 1)] * model.num_mtp_layers
        if adapters is not None:
            parts = [(part._replace(adapters=adapters), count) for part, count in parts]
            if stage == 0:
                parts[0] = (parts[0][0]._replace(frozen=True), 1)
        stages.append(tuple(parts))
    return tuple(stages)


def recomputed(
    parts: Parts, training: Training, *, back: bool = True
) -> tuple[tuple[LayerPart, int, bool], ...]:
    """The parts of a stage with their numbers, and whether the backward recomputes them, as wholes
    or by ops: all layers, or the first ones. With `back`, without those that are frozen, which have
    no backward.
    """
    parts = tuple((part, count) for part, count in parts if not (back and part.frozen))
    num_layers = sum(count for _, count in parts) if training.recompute in ("by-op", "full") else 0
    if training.recompute == "full" and training.recompute_method == "block":
        num_layers = training.recompute_layers
    runs = []
    for part, count in parts:
        again = min(num_layers, count) if part.is_layer else 0
        num_layers -= again
        runs += [(part, again, True)] * (again > 0)
        runs += [(part, count - again, False)] * (count > again or not again)
    return tuple(runs)


def total_parameters(model: Model, parts: Parts, *, frozen: bool = False) -> Parameters:
    """The parameters of a stage that are trained, or those that are `frozen`."""
    total = Parameters()
    for part, count in parts:
        stays = part.frozen or part.adapters is not None
        parameters = part.held(model) if frozen else part.parameters(model)
        total = total.plus(parameters, count * (stays or not frozen))
    return total


def count_parameters(model: Model) -> int:
    """The number of parameters of a model. A tied head counts once; multi-token-prediction layers
    and layers that are frozen do not count.

    **Raises:**

    A `ValueError` of one sentence where a module of it is not known or lacks a key.
    """
    layers = Counter(layers_of(model)).items()
    first, last = ends_of(model)
    parts = ((first, 1), *layers, (last, 1))
    return total_parameters(model, parts).total


def check_modules(model: Model, layout: Layout, training: Training) -> None:
    """Raises a `ValueError` of one sentence if a layout does not fit a module of a model."""
    if layout.ep != 1 and not (has_experts(model) or has_tables(model)):
        raise ValueError(
            f"`layout.ep` is {layout.ep}, but the model is dense and has no experts; use `ep = 1`."
        )
    if training.operators is not None and layout.tp * layout.cp > 1:
        raise ValueError(
            "`training.operators` lists kernels of whole matrices and sequences, which `layout.tp` "
            f"* `layout.cp` = {layout.tp} * {layout.cp} splits; use 1 * 1, or another stack."
        )
    if training.operators is not None and training.recompute in ("selective", "by-op"):
        raise ValueError(
            f"`training.recompute` is '{training.recompute}', but `training.operators` lists what "
            "whole layers run; use 'full' or 'none', or another stack."
        )
    if training.adapters is not None:
        _check_adapters(model, training.adapters.modules)
    for part in _parts(model):
        for module in part.modules:
            module.check(part.of_width(model), layout, part.of_length(training))


def _check_adapters(model: Model, names: Sequence[str]) -> None:
    """Raises a `ValueError` if no matrix of a model has one of these names."""
    first, last = (part.modules[0] for part in ends_of(model))
    parts = _parts(model) if isinstance(first, Embedding) and isinstance(last, Head) else ()
    modules = (module for part in parts for module in part.modules)
    allowed = {name for module in modules for name in module.adapted(model)}
    if allowed.isdisjoint(names):
        use = f"use {', '.join(sorted(allowed))}" if allowed else "leave `training.adapters` out"
        raise ValueError(
            f"`training.adapters.modules` has {', '.join(names)}, and the model no such matrix to "
            f"adapt; {use}."
        )


def has_experts(model: Model) -> bool:
    """Whether some layer of a model has experts, trained or not."""
    return any(part.held(model).experts for part in _parts(model))


def has_tables(model: Model) -> bool:
    """Whether GPUs share embedding tables of a model, as in recommenders."""
    return any(part.held(model).tables for part in _parts(model))


def _parts(model: Model) -> dict[LayerPart, None]:
    """All layers and both ends, each once."""
    different = {id(part): part for part in (*layers_of(model), *ends_of(model))}  # Quicker.
    return dict.fromkeys(different.values())


def widen(model: Model, parameters: int) -> Model:
    """The model in the smallest width that has at least so many parameters (as Composer does,
    arXiv:2510.00379). The width is a multiple of 64 and of `num_heads`, also of those that modules
    have of their own.

    The sizes of MLPs and experts, and the heads or the inner width of Mamba, grow in proportion to
    the width, rounded to multiples of 64 and of 8. The number of attention heads and all other
    sizes stay.

    **Raises:**

    `ValueError` if `parameters` is not a whole number of at least one, if no width has so many, if
    layers have a width of their own, or if modules have sizes tied to the width that do not grow
    with it, as in recommenders and U-Nets.
    """
    if any(layer.hidden_size for layer in model.layers or ()):
        raise ValueError(
            f"A layer of `{model.name}` has a `hidden_size` of its own; give a model of one width."
        )
    parameters = whole_number(parameters, "parameters")
    modules = dict.fromkeys(module for part in _parts(model) for module in part.modules)
    for module in modules:
        for key in _TIED:
            if getattr(module, key, None) is not None:
                raise ValueError(
                    f"`{key}` of the module `{module.kind}` of `{model.name}` is tied to the width "
                    "and does not grow with it; give a model without such modules."
                )
    heads = (getattr(module, "num_heads", 1) for module in modules)
    step = math.lcm(_STEP, model.num_heads or 1, *heads)
    widths = range(step, step * _MOST_STEPS + 1, step)
    at = bisect.bisect_left(
        widths, parameters, key=lambda width: count_parameters(_of_width(model, width))
    )
    if at == len(widths):
        raise ValueError(
            f"No width up to {widths[-1]:,} gives `{model.name}` {parameters:,} parameters; ask "
            "for fewer."
        )
    return _of_width(model, widths[at])


def _of_width(model: Model, width: int) -> Model:
    ratio = width / model.hidden_size
    tables = {name: table | _grown(table, ratio) for name, table in (model.modules or {}).items()}
    grown = _grown({"ffn_size": model.ffn_size}, ratio)
    return replace(model, hidden_size=width, modules=model.modules and tables, **grown)


def _grown(table: dict[str, Any], ratio: float) -> dict[str, int]:
    return {
        key: max(round(table[key] * ratio / unit), 1) * unit
        for key, unit in _GROWING.items()
        if table.get(key)
    }
