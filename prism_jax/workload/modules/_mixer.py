"""Mixers of tokens in linear time: a matrix, a short convolution, a scan in chunks, a gate with a
norm, and a matrix.
"""

import abc
from typing import ClassVar, NamedTuple

from ...data import Layout, Model, Training
from .._block import Kernel, Linear, Open, Segments
from .._costs import Costs
from .._parts import segment
from ._base import AbstractPairModule, Parameters
from ._gather import cast, cast_gradient, check_divides, gradients


class Sizes(NamedTuple):
    """The values of a token within a mixer, on all ranks of a tensor-parallel group together.

    **Attributes:**

    - `projected`: what the first matrix makes and the group splits.
    - `convolved`: of those, what the convolution reads.
    - `mixed`: what the scan makes, and the last matrix reads after its gate and norm.
    - `parameters`: the parameters besides those of matrices.
    - `narrow`: what the first matrix makes besides on each rank, for `inner` matrices to read.
    - `summed`: what the tensor-parallel group sums before the scan.
    """

    projected: int
    convolved: int
    mixed: int
    parameters: Parameters
    narrow: int = 0
    summed: int = 0


class AbstractMixer(AbstractPairModule):
    """A mixer of tokens. In a context-parallel group, each rank scans the whole sequence for a part
    of the heads: an all_to_all before the convolution exchanges tokens for heads, and one after the
    scan exchanges them back, as in Megatron-LM. This group and the tensor-parallel one divide the
    numbers of the keys `divided`.
    """

    divided: ClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def sizes(self, model: Model) -> Sizes: ...

    @abc.abstractmethod
    def scan(self, costs: Costs) -> list[Kernel]:
        """The forward of the scan on one rank."""

    def inner(self, tp: int) -> list[tuple[int, int]]:
        """Further matrices between the first and the scan: what each makes and what it reads, on
        each of `tp` ranks.
        """
        del tp
        return []

    def check(self, model: Model, layout: Layout, training: Training) -> None:
        for key in self.divided:
            number = getattr(self, key, model.hidden_size)
            check_divides(layout, key, number)
            if number // layout.tp % layout.cp != 0:
                raise ValueError(
                    f"`layout.tp`*`layout.cp` = {layout.tp}*{layout.cp} does not divide "
                    f"`model.{key}` = {number}; use a divisor."
                )

    def parameters(self, model: Model) -> Parameters:
        hidden, sizes = model.hidden_size, self.sizes(model)
        split = hidden * (sizes.projected + sizes.mixed) + sum(m * n for m, n in self.inner(1))
        return sizes.parameters.plus(Parameters(split, hidden * sizes.narrow))

    def linears(self, costs: Costs) -> list[Linear]:
        tp, hidden, width = costs.layout.tp, costs.model.hidden_size, self.sizes(costs.model)
        shapes = [(width.projected // tp + width.narrow, hidden), (hidden, width.mixed // tp)]
        return [costs.linear(costs.tokens, *shape) for shape in (*shapes, *self.inner(tp))]

    def between(
        self, costs: Costs, kernels: list[Kernel], *, backward: bool, weights: bool = True
    ) -> Open:
        width, per_rank = self.sizes(costs.model), costs.tokens / costs.layout.tp
        (_, _, *inner), convolves = self.linears(costs), width.convolved > 0
        if backward:
            kernels = [*kernels, move(costs, 6 * width.mixed)]
            # Each product has two gradients; the states are made again.
            scan = [*(3 * self.scan(costs)), *[move(costs, 4 * width.convolved)] * convolves]
            leave = [kernel for linear in inner for kernel in gradients(linear, weights)]
            leave += cast_gradient(costs, int(per_rank * width.projected))
        else:
            kernels = [*kernels, *(linear.forward for linear in inner)]
            scan = [*[move(costs, 2 * width.convolved)] * convolves, *self.scan(costs)]
            leave = [move(costs, 3 * width.mixed)]  # Gated and normed.
            leave += cast(costs, int(per_rank * width.mixed))
        segments: Segments = []
        if width.summed and costs.layout.tp > 1:
            num_bytes = costs.activation_bytes * costs.tokens * width.summed
            sums = costs.collective("all_reduce", num_bytes, costs.group("tp"))
            segments, kernels = [segment(kernels, sums)], []
        if costs.layout.cp == 1:
            return segments, [*kernels, *scan, *leave]
        size = costs.activation_bytes
        sent = [
            costs.collective("all_to_all", size * int(per_rank * values), costs.group("cp"))
            for values in (width.projected, width.mixed)
        ]
        return [*segments, segment(kernels, sent[0]), segment(scan, sent[1])], leave

    def activations(self, costs: Costs) -> dict[str, float]:
        # What the first matrix makes, the convolution's output, that of the scan, gated and normed.
        width = self.sizes(costs.model)
        values = width.projected + width.convolved + width.mixed
        size = costs.activation_bytes * values + costs.input_bytes() * width.mixed
        narrow = costs.activation_bytes * width.narrow
        return {self.kind or "mixer": costs.tokens * (size / costs.layout.tp + narrow)}


def chunk_products(
    costs: Costs, heads: int, length: int, *shapes: tuple[int, int, int]
) -> list[Kernel]:
    """Products of an `(m, k)` with a `(k, n)` matrix for each chunk of a length, of which the last
    of a sequence may not be full, and each of all heads.
    """
    layout, training = costs.layout, costs.training
    chunks = training.microbatch_size * -(-training.sequence_length // length)
    batch = chunks * (heads // (layout.tp * layout.cp))
    return [costs.gemm(*shape, costs.base_dtype, batch) for shape in shapes]


def move(costs: Costs, values: int) -> Kernel:
    return costs.move(
        "elementwise", costs.activation_bytes * costs.tokens * values // costs.layout.tp
    )
