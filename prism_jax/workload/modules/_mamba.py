import dataclasses
from typing import ClassVar

from ...data import Count, Layout, Model, Training
from .._block import Kernel, Linear, Open
from .._costs import Costs
from .._parts import segment
from ._base import AbstractPairModule, Parameters
from ._gather import cast, cast_gradient, check_divides


@dataclasses.dataclass(frozen=True)
class Mamba(AbstractPairModule):
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
        check_divides(layout, "mamba_num_heads", self.mamba_num_heads)
        check_divides(layout, "num_groups", self.num_groups)
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

    def linears(self, costs: Costs) -> tuple[Linear, Linear]:
        tp, hidden = costs.layout.tp, costs.model.hidden_size
        return (
            costs.linear(costs.tokens, self.input_width // tp, hidden),
            costs.linear(costs.tokens, hidden, self.inner_size // tp),
        )

    def between(
        self, costs: Costs, made: list[Kernel], *, backward: bool, weights: bool = True
    ) -> Open:
        tokens, tp = costs.tokens, costs.layout.tp
        if backward:
            made = [*made, self._move(costs, 6 * self.inner_size)]
            # Each product has two gradients; the states are made again.
            scan = [*(3 * self._scan(costs)), self._move(costs, 4 * self.conv_width)]
            leave = cast_gradient(costs, tokens * self.input_width // tp)
        else:
            scan = [self._move(costs, 2 * self.conv_width), *self._scan(costs)]
            leave = [self._move(costs, 3 * self.inner_size)]  # Gated and normed.
            leave += cast(costs, tokens * self.inner_size // tp)
        if costs.layout.cp == 1:
            return [], [*made, *scan, *leave]
        sent = [
            costs.collective("all_to_all", 2 * (tokens * width // tp), costs.group("cp"))
            for width in (self.input_width, self.inner_size)
        ]
        return [segment(made, sent[0]), segment(scan, sent[1])], leave

    def activations(self, costs: Costs) -> dict[str, float]:
        # What the first matrix makes, the convolution's output, that of the scan, gated and normed.
        width = self.input_width + self.conv_width + self.inner_size
        size = costs.activation_bytes * width + costs.input_bytes() * self.inner_size
        return {"mamba": costs.tokens * size / costs.layout.tp}

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
