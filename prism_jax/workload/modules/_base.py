"""The base class of the modules of a layer."""

import abc
from typing import ClassVar, NamedTuple

from ...data import Layout, Model, Training
from .._block import Kernel, Segment
from .._costs import Costs


class Parameters(NamedTuple):
    """Numbers of parameters, by how they are distributed.

    **Attributes:**

    - `split`: parameters that are split over the tensor-parallel group.
    - `copied`: parameters of which each rank of the tensor-parallel group has a copy.
    - `experts`: parameters that are split over the expert-parallel group and the tensor-parallel
        group of experts.
    - `tables`: values of embedding tables, which are split over the expert-parallel group. A step
        updates the rows that it looked up, so that they have no gradients to reduce.
    """

    split: int = 0
    copied: int = 0
    experts: int = 0
    tables: int = 0

    @property
    def total(self) -> int:
        return sum(self)

    def plus(self, other: "Parameters", times: int = 1) -> "Parameters":
        """The sum with `times` another."""
        return Parameters(*(a + times * b for a, b in zip(self, other, strict=True)))


class AbstractModule(abc.ABC):
    """Abstract base class for all modules: the kernels, parameters and activations of one module.

    Subclasses are frozen dataclasses. Their fields are the keys of a module's table in a file. Keys
    that `Model` has too are taken from there if the table does not have them. A file names a module
    by its `kind`.

    A layer adds a norm before each of its modules and a residual after it, unless the class sets
    `in_residual` to false. Kernels just before a module's input is gathered are passed to it as
    `before`, because the gather waits for them as well.
    """

    kind: ClassVar[str | None] = None
    in_residual: ClassVar[bool] = True

    @abc.abstractmethod
    def check(self, model: Model, layout: Layout, training: Training) -> None:
        """Raises a `ValueError` of one sentence if a layout does not fit the module."""

    @abc.abstractmethod
    def parameters(self, model: Model) -> Parameters:
        """The parameters of the module, without its norm."""

    @abc.abstractmethod
    def forward(self, costs: Costs, before: list[Kernel]) -> list[Segment]:
        """The segments of the forward of one microbatch.

        **Arguments:**

        - `costs`: gives the costs of kernels.
        - `before`: kernels that run before the first of the module.
        """

    @abc.abstractmethod
    def backward(
        self, costs: Costs, before: list[Kernel], *, weights: bool = True
    ) -> list[Segment]:
        """The segments of the backward of one microbatch.

        **Arguments:**

        - `costs`, `before`: as in `forward`.
        - `weights`: whether to include the gradients of the weights. Without them, this is the
            phase backward-input.
        """

    @abc.abstractmethod
    def backward_weight(self, costs: Costs) -> list[Segment]:
        """The segments of the gradients of the weights alone: the phase backward-weight."""

    @abc.abstractmethod
    def activations(self, costs: Costs) -> dict[str, float]:
        """The activations that the forward of one microbatch keeps for its backward on each GPU, in
        bytes, by part.

        They do not include the input and the output of the norm before the module, nor the mask of
        a dropout after it.
        """

    def last_product(self, costs: Costs) -> Kernel | None:
        """The product at the end of the forward, if only what follows the module needs it."""
        del costs
        return None

    def of_layer(self, number: int) -> "AbstractModule":
        """The module in the layer with this number, counted from zero."""
        del number
        return self

    def buffers(self, costs: Costs) -> float:
        """The bytes that the backward needs besides the activations and as much for their
        gradients.
        """
        del costs
        return 0.0
