"""What a module of a layer knows of itself."""

import abc
from typing import ClassVar, NamedTuple

from ...data import Layout, Model, Training
from .._block import Kernel, Segment
from .._costs import Costs


class Parameters(NamedTuple):
    """How many parameters there are, by who holds them.

    **Attributes:**

    - `split`: divided over the tensor-parallel group.
    - `copied`: each rank of the tensor-parallel group has all of them.
    - `experts`: divided over the expert-parallel group and the tensor-parallel group of experts.
    """

    split: int = 0
    copied: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        return self.split + self.copied + self.experts

    def plus(self, other: "Parameters", times: int = 1) -> "Parameters":
        """The sum with `times` another."""
        return Parameters(*(a + times * b for a, b in zip(self, other, strict=True)))


class AbstractModule(abc.ABC):
    """Abstract base class for all modules: what one part of a layer runs, holds and keeps.

    Subclasses are frozen dataclasses, whose fields are what a file may say of a module; those that
    `Model` has too are taken from there where the module's table leaves them out. A file names a
    module by its `kind`.

    A layer puts a norm before each of its modules and a residual after it, unless the class says
    that it is not `in_residual`. What runs just before a
    module's input is gathered is handed to it as `before`, so that it is waited for with the rest.
    """

    kind: ClassVar[str | None] = None
    in_residual: ClassVar[bool] = True

    @abc.abstractmethod
    def check(self, model: Model, layout: Layout, training: Training) -> None:
        """Raises a `ValueError` of one sentence where a layout does not fit the module."""

    @abc.abstractmethod
    def parameters(self, model: Model) -> Parameters:
        """The parameters of one such module, without its norm."""

    @abc.abstractmethod
    def forward(self, costs: Costs, before: list[Kernel]) -> list[Segment]:
        """The segments of the forward of one microbatch.

        **Arguments:**

        - `costs`: prices kernels.
        - `before`: kernels that come before the module's first.
        """

    @abc.abstractmethod
    def backward(
        self, costs: Costs, before: list[Kernel], *, weights: bool = True
    ) -> list[Segment]:
        """The segments of the backward of one microbatch.

        **Arguments:**

        - `costs`, `before`: as of `forward`.
        - `weights`: whether the gradients of the weights are among them; without, this is the phase
            backward-input.
        """

    @abc.abstractmethod
    def backward_weight(self, costs: Costs) -> list[Segment]:
        """The segments of the gradients of the weights alone: the phase backward-weight."""

    @abc.abstractmethod
    def activations(self, costs: Costs) -> dict[str, float]:
        """What the forward of one microbatch keeps for its backward on each GPU, in bytes, by part.

        The input of the norm before the module, its output and the mask of a dropout after the
        module are not among them.
        """

    def of_layer(self, number: int) -> "AbstractModule":
        """The module as the layer of this number has it, counted from zero."""
        del number
        return self

    def buffers(self, costs: Costs) -> float:
        """Bytes that the backward needs besides what is kept and as much for its gradients."""
        del costs
        return 0.0
