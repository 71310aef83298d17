"""The operators of a module, for a framework that runs each as kernels of its own, and which of
them matrix products have around them.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from ...data import Model
from .._costs import Costs
from ._core import Core


class Operator(NamedTuple):
    """An operator of a module.

    **Attributes:**

    - `name`: its name in the lists of `kernels/operators/`.
    - `values`: how many values there are of each letter of the lists.
    - `matrix`: the values of a token that its matrix reads, and that it makes, if it is one.
    - `groups`: how many such matrices there are, among which copies of the tokens are divided.
    - `copies`: to how many of them a token goes.
    - `dtype`: that of the product, if it is not that of the training.
    - `core`: the core of attention, if it is that.
    - `trained`: whether its weights are trained, or those of the matrix that reads what it makes.
    """

    name: str
    values: Mapping[str, float]
    matrix: tuple[int, int] | None = None
    groups: int = 1
    copies: int = 1
    dtype: str | None = None
    core: Core | None = None
    trained: bool = True


def norm_name(model: Model) -> str:
    """The operator of the model's norms."""
    return model.norm if model.norm.endswith("rmsnorm") else "layernorm"


def matrices(
    costs: Costs, outputs: Iterable[int], inputs: int, name: str = "", *, biased: bool
) -> Iterator[Operator]:
    """Matrices that read the same input; `name` is that of their adapters."""
    read = {"x": costs.tokens * inputs}
    for number, width in enumerate(outputs):
        yield from [Operator("shared", read)] * (number > 0)
        yield Operator("input", read)
        yield from matrix(costs, (inputs, width), name, biased=biased, source="input")


def matrix(
    costs: Costs,
    shape: tuple[int, int],
    name: str = "",
    *,
    biased: bool,
    source: Literal["input", "product"] = "product",
) -> Iterator[Operator]:
    """A matrix whose input has its dtype already, and the adapter that reads the same `source`."""
    inputs, outputs = shape
    values = {"w": inputs * outputs, "o": costs.tokens * outputs}
    yield Operator("matrix", values, shape)
    yield from [Operator("bias", values)] * biased
    adapters = costs.training.adapters
    if adapters is None or name not in adapters.modules:
        return
    read = {"x": costs.tokens * inputs}
    yield from [Operator("adapter-dropout", read)] * adapters.dropout
    yield Operator(f"adapter-{source}", read)
    for size in ((inputs, adapters.rank), (adapters.rank, outputs)):
        yield Operator("adapter-matrix", {"w": size[0] * size[1]}, size)
    yield Operator("adapter", {"o": costs.tokens * outputs, "r": costs.tokens * adapters.rank})
