import dataclasses
from typing import ClassVar

from ...data import Count, Model
from .._block import Kernel
from .._costs import Costs
from ._base import Parameters
from ._mixer import AbstractMixer, Sizes, chunk_products


@dataclasses.dataclass(frozen=True)
class Mamba(AbstractMixer):
    """A Mamba-2 mixer: a short convolution and a state-space scan between two matrices.

    The cost of the scan is that of the products of its chunks (Dao and Gu 2024, arXiv:2405.21060,
    section 6): within a chunk, as in attention without a softmax, and into and out of the state.

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
    divided: ClassVar[tuple[str, ...]] = ("mamba_num_heads", "num_groups")

    mamba_num_heads: Count
    mamba_head_size: Count = 64
    state_size: Count = 128
    num_groups: Count = 8
    conv_size: Count = 4
    chunk_size: Count = 128

    def sizes(self, model: Model) -> Sizes:
        # Inputs, and the inputs and outputs of the states; a gate, and the step of each head.
        inner = self.mamba_num_heads * self.mamba_head_size
        convolved = inner + 2 * self.num_groups * self.state_size
        # Taps and biases; decay, skip and step of each head, and the norm before the last matrix.
        split = convolved * (self.conv_size + 1) + 3 * self.mamba_num_heads + inner
        projected = inner + convolved + self.mamba_num_heads
        return Sizes(projected, convolved, inner, Parameters(split))

    def scan(self, costs: Costs) -> list[Kernel]:
        length = min(self.chunk_size, costs.training.sequence_length)
        state, size = self.state_size, self.mamba_head_size
        shapes = ((length, size, length), (state, size, length), (length, size, state))
        pairs = chunk_products(costs, self.num_groups, length, (length, length, state))
        return [*pairs, *chunk_products(costs, self.mamba_num_heads, length, *shapes)]
