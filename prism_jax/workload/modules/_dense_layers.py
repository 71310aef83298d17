"""Modules of recommenders that every GPU has whole, for the samples of its own."""

import dataclasses
import itertools as it
from typing import ClassVar

from msgspec.structs import astuple, replace

from ...cluster import gemm_latency
from ...data import Count, Layout, Model, Training
from .._block import Kernel, Linear, Segment
from .._costs import Costs
from .._parts import segment
from ._base import AbstractModule, Parameters
from ._gather import gradients


def short_linear(costs: Costs, n: int, k: int) -> Linear:
    """The matrix that takes `k` values of each of a GPU's samples to `n`. Its products take
    microseconds. If the device was measured by shape, they take as long as measured: efficiencies
    were chosen with the products of language models.
    """
    m, on = costs.tokens, costs.kernels
    known = costs.linear(m, n, k, costs.base_dtype)
    found: list[Kernel] = []
    for kernel, shape in zip(astuple(known), ((m, n, k), (m, k, n), (k, n, m)), strict=True):
        seconds = gemm_latency(on, "bf16", *shape)  # As fast as fp16.
        mean = kernel.mean if seconds is None else max(on.compute * seconds, on.floor_s)
        found.append(replace(kernel, mean=mean, size=f"{kernel.size} short"))
    return Linear(*found)


def check_data_parallel(kind: str, layout: Layout) -> None:
    """Raises a `ValueError` of one sentence if a layout splits samples or the model."""
    if layout.world_size != layout.dp:
        raise ValueError(
            f"`layout` is {layout.degrees}, but a model with `{kind}` is data parallel; use of "
            "`layout` only `dp`."
        )


class AbstractSampleModule(AbstractModule):
    """A module without a norm and a residual, in which no GPU waits for another: serial matrices,
    and what is moved besides.
    """

    in_residual = False

    def check(self, model: Model, layout: Layout, training: Training) -> None:
        """Every GPU has all of it; `embedding-bags` refuses a layout that splits samples."""

    def forward(self, costs: Costs, before: list[Kernel]) -> list[Segment]:
        products = [one.forward for one in self.linears(costs)]
        return [segment([*before, *products, *self.moved(costs, backward=False)])]

    def backward(
        self, costs: Costs, before: list[Kernel], *, weights: bool = True
    ) -> list[Segment]:
        products = (kernel for one in self.linears(costs) for kernel in gradients(one, weights))
        return [segment([*before, *self.moved(costs, backward=True), *products])]

    def backward_weight(self, costs: Costs) -> list[Segment]:
        return [segment([one.wgrad for one in self.linears(costs)])]

    def linears(self, costs: Costs) -> list[Linear]:
        """The matrices, in order."""
        del costs
        return []

    def moved(self, costs: Costs, *, backward: bool) -> list[Kernel]:
        """The kernels besides those of the matrices."""
        del costs, backward
        return []


@dataclasses.dataclass(frozen=True)
class DenseLayers(AbstractSampleModule):
    """Matrices one after the other, each with a bias and an activation, which are parts of the
    product's kernel (the epilogues of cuBLASLt). As the last module of a recommender its one output
    is the logit of a click, whose loss takes no time.

    **Attributes:**

    - `layer_sizes`: the width of the input, and that after each matrix.
    """

    kind: ClassVar[str] = "dense-layers"

    layer_sizes: tuple[Count, ...]

    def parameters(self, model: Model) -> Parameters:
        return Parameters(copied=sum((n + 1) * m for n, m in it.pairwise(self.layer_sizes)))

    def activations(self, costs: Costs) -> dict[str, float]:
        return {"dense": costs.activation_bytes * costs.tokens * sum(self.layer_sizes)}

    def linears(self, costs: Costs) -> list[Linear]:
        return [short_linear(costs, n, k) for k, n in it.pairwise(self.layer_sizes)]


@dataclasses.dataclass(frozen=True)
class CrossLayer(AbstractSampleModule):
    """A cross layer of DCN-V2 (Wang et al. 2021, arXiv:2008.13535): the output of a square matrix,
    or of two of low rank, times the features, added to the layer's input.

    **Attributes:**

    - `width`: the width of the features: those of all tables, and the dense ones.
    - `low_rank`: the width between two matrices; by default one matrix.
    """

    kind: ClassVar[str] = "cross-layer"

    width: Count
    low_rank: Count | None = None

    def parameters(self, model: Model) -> Parameters:
        between = 2 * self.low_rank if self.low_rank else self.width
        return Parameters(copied=self.width * (between + 1))

    def activations(self, costs: Costs) -> dict[str, float]:
        values = costs.tokens * (2 * self.width + (self.low_rank or 0))
        return {"interaction": costs.activation_bytes * values}

    def linears(self, costs: Costs) -> list[Linear]:
        sizes = (self.width, self.low_rank, self.width) if self.low_rank else (self.width,) * 2
        return DenseLayers(sizes).linears(costs)

    def moved(self, costs: Costs, *, backward: bool) -> list[Kernel]:
        # Reads product, features and input, writes their sum. The backward reads the gradient,
        # the product, the features and their gradient, and writes two gradients.
        return [costs.move("elementwise", (12 if backward else 8) * costs.tokens * self.width)]


@dataclasses.dataclass(frozen=True)
class DotInteraction(AbstractSampleModule):
    """The products of each pair of a sample's vectors, each of `hidden_size` values (DLRM, Naumov
    et al. 2019, arXiv:1906.00091).

    **Attributes:**

    - `num_vectors`: how many vectors: those of all tables, and that of the dense features.
    """

    kind: ClassVar[str] = "dot-interaction"

    num_vectors: Count

    def parameters(self, model: Model) -> Parameters:
        return Parameters()

    def activations(self, costs: Costs) -> dict[str, float]:
        values = costs.tokens * self.num_vectors * costs.model.hidden_size
        return {"interaction": costs.activation_bytes * values}

    def moved(self, costs: Costs, *, backward: bool) -> list[Kernel]:
        """All pairs, of which half are kept. The gradient is one product, as both factors are the
        same vectors.
        """
        n, width = self.num_vectors, costs.model.hidden_size
        sizes = (n, width, n) if backward else (n, n, width)
        pairs = costs.gemm(*sizes, costs.base_dtype, costs.tokens)
        return [pairs, costs.move("elementwise", 3 * costs.tokens * n * n)]
