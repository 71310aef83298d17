"""The base classes of the modules of a layer, and how a module is made from its table in a file."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec

from ..._installed import Plugins, all_named, named
from ..._misc import quoted, subclasses, unknown_name
from ...data import Layout, Model, Training
from .._block import Kernel, Linear, Open, Result, Segments, weights_of
from .._costs import Costs
from .._parts import segment, without_end
from ._gather import (
    cast,
    cast_gradient,
    close_backward,
    close_module,
    gradients,
    open_module,
    weight_gradients,
)
from ._operators import Operator


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

    def plus(self, addend: "Parameters", times: int = 1) -> "Parameters":
        """The sum with `times` another."""
        return Parameters(*(a + times * b for a, b in zip(self, addend, strict=True)))


def closed(costs: Costs, last: Linear) -> list[Result]:
    """The result of the last product of a module. Of its sum over a tensor-parallel group that
    splits the sequence, each rank keeps its part.
    """
    return [Result(2 * costs.states, last.forward)] if costs.splits_sequence else [*last.results]


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

    def check(self, model: Model, layout: Layout, training: Training) -> None:
        """Raises a `ValueError` of one sentence if a layout does not fit the module; by default any
        does.
        """
        del model, layout, training

    @abc.abstractmethod
    def parameters(self, model: Model) -> Parameters:
        """The parameters of the module, without its norm."""

    def adapted(self, model: Model) -> dict[str, Parameters]:
        """The matrices that adapters may be of, by their names, and how many parameters an adapter
        of rank one has: as many as the matrix reads and makes of a token.
        """
        del model
        return {}

    @abc.abstractmethod
    def forward(self, costs: Costs, before: list[Kernel]) -> Segments:
        """The segments of the forward of one microbatch.

        **Arguments:**

        - `costs`: gives the costs of kernels.
        - `before`: kernels that run before the first of the module.
        """

    @abc.abstractmethod
    def backward(self, costs: Costs, before: list[Kernel], *, weights: bool = True) -> Segments:
        """The segments of the backward of one microbatch.

        **Arguments:**

        - `costs`, `before`: as in `forward`.
        - `weights`: whether to include the gradients of the weights. Without them, this is the
            phase backward-input.
        """

    @abc.abstractmethod
    def backward_weight(self, costs: Costs) -> Segments:
        """The segments of the gradients of the weights alone: the phase backward-weight."""

    @abc.abstractmethod
    def activations(self, costs: Costs) -> dict[str, float]:
        """The activations that the forward of one microbatch keeps for its backward on each GPU, in
        bytes, by part.

        They do not include the input and the output of the norm before the module, nor the mask of
        a dropout after it.
        """

    def operators(self, costs: Costs) -> list[Operator] | None:
        """Its operators in the order of its forward, without those of the norms and the residual
        around it, for a framework that runs each as kernels of its own (`kernels/operators/`);
        `None` if they are not known, so that its kernels are those of `forward`.
        """
        del costs
        return None

    def results(self, costs: Costs) -> list[Result]:
        """What `recompute = "by-op"` may keep of the forward, in order. A module without any is
        computed again as a whole.
        """
        del costs
        return []

    def last_product(self, costs: Costs) -> Kernel | None:
        """The product at the end of the forward, if only what follows the module needs it."""
        del costs
        return None

    @property
    def used_experts(self) -> float:
        """The share of its experts' parameters that a token passes through."""
        return 1.0

    def of_layer(self, number: int) -> "AbstractModule":
        """The module in the layer with this number, counted from zero."""
        del number
        return self

    def normed_bytes(self, costs: Costs) -> float:
        """The bytes of a value of the norm before the module that are kept for the backward."""
        return costs.input_bytes()

    def skipped_flop(self, costs: Costs) -> float:
        """How many operations the backward has fewer than twice the forward."""
        del costs
        return 0.0

    def buffers(self, costs: Costs) -> float:
        """The bytes that the backward needs besides the activations and as much for their
        gradients.
        """
        del costs
        return 0.0


class AbstractFirstModule(AbstractModule):
    """The first module of a model, without a norm and a residual. Nothing waits for its backward,
    but this needs the last gradient to arrive, so that all of it belongs to backward-weight.
    """

    in_residual = False

    def backward(self, costs: Costs, before: list[Kernel], *, weights: bool = True) -> Segments:
        return self.gradients(costs, before) if weights else [segment(before)]

    def backward_weight(self, costs: Costs) -> Segments:
        return self.gradients(costs, [])

    @abc.abstractmethod
    def gradients(self, costs: Costs, before: list[Kernel]) -> Segments:
        """The segments of its backward. The arguments are those of `forward`."""


class AbstractPairModule(AbstractModule):
    """A module between two matrices that a tensor-parallel group splits: the first by what it
    makes of the gathered input, the last by what it reads.
    """

    def forward(self, costs: Costs, before: list[Kernel]) -> Segments:
        first, last, *_ = self.linears(costs)
        kernels = [*cast(costs, costs.tokens * costs.model.hidden_size), first.forward]
        segments, open_kernels = self.between(costs, kernels, backward=False)
        segments = [*segments, *close_module(costs, [*open_kernels, last.forward], last.forward)]
        return open_module(costs, before, first.forward, segments)

    def backward(self, costs: Costs, before: list[Kernel], *, weights: bool = True) -> Segments:
        first, last, *_ = self.linears(costs)
        again = self.forward(costs, []) if costs.recomputes(self.kind) else []
        if again and costs.training.recompute_early_stop:
            again = without_end(again, last.forward)
        kernels = cast_gradient(costs, costs.tokens * costs.model.hidden_size)
        kernels += gradients(last, weights)
        segments, open_kernels = self.between(costs, kernels, backward=True, weights=weights)
        segments = [*segments, *close_backward(costs, open_kernels, first, weights)]
        return [*again, *open_module(costs, before, last.dgrad, segments)]

    def backward_weight(self, costs: Costs) -> Segments:
        return weight_gradients(costs, *self.linears(costs))

    @abc.abstractmethod
    def linears(self, costs: Costs) -> Sequence[Linear]:
        """The first matrix, the last, and others between them."""

    @abc.abstractmethod
    def between(
        self, costs: Costs, kernels: list[Kernel], *, backward: bool, weights: bool = True
    ) -> Open:
        """What runs between the two matrices.

        **Arguments:**

        - `kernels`: those of the matrix before, which is the last one in the backward.
        - `weights`: as in `backward`.
        """


class AbstractSampleModule(AbstractModule):
    """A module without a norm and a residual, in which no GPU waits for another, because each has
    all of it: serial matrices, and what is moved besides.
    """

    in_residual = False

    def forward(self, costs: Costs, before: list[Kernel]) -> Segments:
        products = [linear.forward for linear in self.linears(costs)]
        return [segment([*before, *products, *self.moved(costs, backward=False)])]

    def backward(self, costs: Costs, before: list[Kernel], *, weights: bool = True) -> Segments:
        products = (
            kernel for linear in self.linears(costs) for kernel in gradients(linear, weights)
        )
        return [segment([*before, *self.moved(costs, backward=True), *products])]

    def backward_weight(self, costs: Costs) -> Segments:
        return [segment(weights_of(*self.linears(costs)))]

    def parameters(self, model: Model) -> Parameters:
        return Parameters()

    def linears(self, costs: Costs) -> list[Linear]:
        """The matrices, in order."""
        del costs
        return []

    def moved(self, costs: Costs, *, backward: bool) -> list[Kernel]:
        """The kernels besides those of the matrices."""
        del costs, backward
        return []


_PLUGINS = Plugins("modules", "module", AbstractModule)


def modules() -> dict[str, type[AbstractModule]]:
    """The modules that files can name, including those that other packages add."""
    return all_named(_PLUGINS, _imported())


def _imported() -> dict[str, type[AbstractModule]]:
    return {cls.kind: cls for cls in subclasses(AbstractModule) if cls.kind is not None}


def make_module(model: Model, name: str) -> AbstractModule:
    """The module that a model calls `name`.

    **Arguments:**

    - `model`: the model. Its `modules` may have a table with this name; its own keys are used for
        keys that the table does not have.
    - `name`: the name of the table, or a kind of module.

    **Returns:**

    The module.

    **Raises:**

    A `ValueError` of one sentence for an unknown kind or key, or an invalid value.
    """
    table = dict((model.modules or {}).get(name, {}))
    kind = table.pop("kind", name)
    cls = named(_PLUGINS, _imported(), kind if isinstance(kind, str) else quoted(kind))
    fields = {field.name for field in dataclasses.fields(cls)}  # pyright: ignore
    where = f"model.modules.{name}"
    for key in table:
        if key not in fields:
            of_fields = (f"{where}.{field}" for field in fields)
            raise ValueError(unknown_name("key", f"{where}.{key}", of_fields))
    shared = {key: getattr(model, key, None) for key in fields}
    values = {key: value for key, value in shared.items() if value is not None} | table
    try:
        module = msgspec.convert(values, cls)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        missing = message.removeprefix("Object missing required field `")
        if missing != message:
            inner = f"{where}.{path.rstrip('`')}" if path else "model"
            missing = quoted(f"{inner}.{missing.rstrip('`')}")
            raise ValueError(
                f"the key `{missing}` is missing, which the module `{quoted(name)}` needs; add it."
            ) from None
        key = f"{where}.{path.rstrip('`')}" if path else where
        raise ValueError(f"the key `{quoted(key)}` cannot be used: {quoted(message)}.") from None
    _check_inner(table, module, where)
    return module


def _check_inner(table: Any, module: Any, where: str) -> None:
    """Raises a `ValueError` for an unknown key of a table within the table of a module."""
    if isinstance(table, Mapping) and dataclasses.is_dataclass(module):
        own_fields = [f"{where}.{field.name}" for field in dataclasses.fields(module)]
        for key, value in table.items():
            if f"{where}.{key}" not in own_fields:
                raise ValueError(unknown_name("key", f"{where}.{key}", own_fields))
            _check_inner(value, getattr(module, key), f"{where}.{key}")
    elif isinstance(table, Sequence) and isinstance(module, tuple):
        for i, pair in enumerate(zip(table, module, strict=True)):
            _check_inner(*pair, f"{where}[{i}]")
