"""The operators of a module, for a framework that runs each as kernels of its own, and which of
them matrix products have around them.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ...data import Model
from .._costs import Costs
from ._core import Core


class Operator(NamedTuple):
    """An operator of a module.

    **Attributes:**

    - `name`: its name in the lists of `kernels/operators/`.
    - `values`: how many values there are of each letter of the lists.
    - `matrix`: the values of a token that its matrix reads, and that it makes, if it is one.
    - `core`: the core of attention, if it is that.
    """

    name: str
    values: Mapping[str, float]
    matrix: tuple[int, int] | None = None
    core: Core | None = None


def norm_name(model: Model) -> str:
    """The operator of the model's norms."""
    return model.norm if model.norm.endswith("rmsnorm") else "layernorm"


def matrices(costs: Costs, made: Iterable[int], inputs: int, *, biased: bool) -> Iterator[Operator]:
    """Matrices that read the same input."""
    read = {"x": costs.tokens * inputs}
    for number, outputs in enumerate(made):
        yield from [Operator("shared", read)] * (number > 0)
        yield Operator("input", read)
        yield from matrix(costs, (inputs, outputs), biased=biased)


def matrix(costs: Costs, shape: tuple[int, int], *, biased: bool) -> Iterator[Operator]:
    """A matrix whose input has its dtype already."""
    inputs, outputs = shape
    values = {"w": inputs * outputs, "o": costs.tokens * outputs}
    yield Operator("matrix", values, shape)
    yield from [Operator("bias", values)] * biased
