import dataclasses
from typing import ClassVar

from ...data import Count, Layout, Model, Training
from .._block import Kernel, Linear, Segment
from .._costs import Costs
from .._parts import segment
from ._base import AbstractModule, Parameters
from ._gather import (
    cast,
    cast_gradient,
    check_divides,
    close_backward,
    close_module,
    gradients,
    open_module,
    weight_gradients,
)


@dataclasses.dataclass(frozen=True)
class Mamba(AbstractModule):
    """A Mamba-2 mixer: a short convolution and a state-space scan between two matrices.

    The cost of the scan is that of the products of its chunks (Dao and Gu 2024, arXiv:2405.21060,
    section 6): within a chunk, as in attention without a softmax, and into and out of the state. In
    a context-parallel group, each rank scans the whole sequence for some of the heads. An
    all_to_all before the convolution exchanges tokens for heads, and one after the scan exchanges
    them back, as in Megatron-LM.

    **Attributes:**

    - `mamba_num_heads`, `mamba_head_size`: the number and the size of heads; their product is the
        inner width.
    - `state_size`: the size of the state of each head.
    - `num_groups`: the number of groups of heads; the heads of a group share the inputs and outputs
        of the state.
    - `conv_size`: how many tokens the convolution covers.
    - `chunk_size`: the chunk size of the scan.
    """

    kind: ClassVar[str] = "mamba"

    mamba_num_heads: Count
    mamba_head_size: Count = 64
    state_size: Count = 128
    num_groups: Count = 8
    conv_size: Count = 4
    chunk_size: Count = 128

    @property
    def inner_size(self) -> int:
        return self.mamba_num_heads * self.mamba_head_size

    @property
    def conv_width(self) -> int:
        """The width of the convolution: inputs, and the inputs and outputs of the states."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def input_width(self) -> int:
        """The width of the input matrix's output, with the gate and the time step of each head."""
        return self.inner_size + self.conv_width + self.mamba_num_heads

    def check(self, model: Model, layout: Layout, training: Training) -> None:
        check_divides(("tp", layout.tp), "mamba_num_heads", self.mamba_num_heads)
        check_divides(("tp", layout.tp), "num_groups", self.num_groups)
        for key in ("mamba_num_heads", "num_groups"):
            if getattr(self, key) // layout.tp % layout.cp != 0:
                raise ValueError(
                    f"`layout.tp`*`layout.cp` = {layout.tp}*{layout.cp} does not divide "
                    f"`model.{key}` = {getattr(self, key)}; use a divisor."
                )

    def parameters(self, model: Model) -> Parameters:
        matrices = model.hidden_size * (self.input_width + self.inner_size)
        conv = self.conv_width * (self.conv_size + 1)
        # Decay, skip and step of each head, and the norm before the last matrix.
        return Parameters(matrices + conv + 3 * self.mamba_num_heads + self.inner_size)

    def forward(self, costs: Costs, before: list[Kernel]) -> list[Segment]:
        first, last = self._linears(costs)
        enter = [*cast(costs, costs.tokens * costs.model.hidden_size), first.forward]
        scan = [self._move(costs, 2 * self.conv_width), *self._scan(costs)]
        leave = [
            self._move(costs, 3 * self.inner_size),  # Gated and normed.
            *cast(costs, costs.tokens * self.inner_size // costs.layout.tp),
            last.forward,
        ]
        segments, kernels = self._exchanged(costs, [enter, scan, leave])
        rest = [*segments, *close_module(costs, kernels, last.forward)]
        return open_module(costs, before, first.forward, rest)

    def backward(
        self, costs: Costs, before: list[Kernel], *, weights: bool = True
    ) -> list[Segment]:
        first, last = self._linears(costs)
        enter = [
            *cast_gradient(costs, costs.tokens * costs.model.hidden_size),
            *gradients(last, weights),
            self._move(costs, 6 * self.inner_size),
        ]
        # Each product has two gradients; the states are made again.
        scan = [*(3 * self._scan(costs)), self._move(costs, 4 * self.conv_width)]
        leave = cast_gradient(costs, costs.tokens * self.input_width // costs.layout.tp)
        segments, kernels = self._exchanged(costs, [enter, scan, leave])
        rest = [*segments, *close_backward(costs, kernels, first, weights)]
        return open_module(costs, before, last.dgrad, rest)

    def backward_weight(self, costs: Costs) -> list[Segment]:
        return weight_gradients(costs, *self._linears(costs))

    def activations(self, costs: Costs) -> dict[str, float]:
        # What the first matrix makes, the convolution's output, that of the scan, gated and normed.
        width = (self.input_width + self.conv_width + 2 * self.inner_size) // costs.layout.tp
        return {"mamba": costs.activation_bytes * costs.tokens * width}

    def _exchanged(
        self, costs: Costs, parts: list[list[Kernel]]
    ) -> tuple[list[Segment], list[Kernel]]:
        """Kernels before, in and after the scan, with an all_to_all between them. The last kernels
        are those of an open segment.
        """
        if costs.layout.cp == 1:
            return [], [kernel for part in parts for kernel in part]
        widths = (self.input_width, self.inner_size)
        values = [costs.tokens * width // costs.layout.tp for width in widths]
        sent = [costs.collective("all_to_all", 2 * size, costs.group("cp")) for size in values]
        return [segment(part, one) for part, one in zip(parts, sent, strict=False)], parts[-1]

    def _linears(self, costs: Costs) -> tuple[Linear, Linear]:
        tp, hidden = costs.layout.tp, costs.model.hidden_size
        return (
            costs.linear(costs.tokens, self.input_width // tp, hidden),
            costs.linear(costs.tokens, hidden, self.inner_size // tp),
        )

    def _scan(self, costs: Costs) -> list[Kernel]:
        layout, length = costs.layout, costs.training.sequence_length
        chunk = min(self.chunk_size, length)
        chunks = costs.training.microbatch_size * -(-length // chunk)  # The last may not be full.
        heads = self.mamba_num_heads // (layout.tp * layout.cp)
        groups = self.num_groups // (layout.tp * layout.cp)
        state, size, dtype = self.state_size, self.mamba_head_size, costs.base_dtype
        return [
            costs.gemm(chunk, chunk, state, dtype, chunks * groups),
            costs.gemm(chunk, size, chunk, dtype, chunks * heads),
            costs.gemm(state, size, chunk, dtype, chunks * heads),
            costs.gemm(chunk, size, state, dtype, chunks * heads),
        ]

    def _move(self, costs: Costs, values: int) -> Kernel:
        return costs.move("elementwise", 2 * costs.tokens * values // costs.layout.tp)
