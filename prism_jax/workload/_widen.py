"""Models of a given number of parameters."""

import bisect
import math
from typing import Any

from msgspec.structs import replace

from .._misc import whole_number
from ..data import Model
from ._architecture import count_parameters, ends_of, layers_of
from .modules import AbstractModule


# The sizes that grow with the width, and what they are multiples of.
_GROWING = {"ffn_size": 64, "expert_ffn_size": 64, "shared_ffn_size": 64, "mamba_num_heads": 8}
# Sizes that are the width, or follow from it, in ways that only the author of a model knows.
_TIED = ("tables", "layer_sizes", "width", "in_channels", "out_channels", "skip_channels")
_TIED += ("time_size",)
_STEP, _MOST_STEPS = 64, 2**16


def widen(model: Model, parameters: int) -> Model:
    """The model in the smallest width that has at least so many parameters (as Composer does,
    arXiv:2510.00379). The width is a multiple of 64 and of `num_heads`, also of those that modules
    have of their own.

    The sizes of MLPs and experts, and the heads of Mamba, grow in proportion to the width, rounded
    to multiples of 64 and of 8. The number of attention heads and all other sizes stay.

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
    modules = _modules_of(model)
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


def _modules_of(model: Model) -> dict[AbstractModule, None]:
    """The modules of all layers and both ends, each once."""
    parts = dict.fromkeys((*layers_of(model), *ends_of(model)))
    return dict.fromkeys(module for part in parts for module in part.modules)


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
