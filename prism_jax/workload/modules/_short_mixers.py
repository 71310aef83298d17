"""Mixers of tokens without a state of keys and values for each head."""

import dataclasses
from typing import ClassVar

from ...data import Count, Model
from .._block import Kernel
from .._costs import Costs
from ._base import Parameters
from ._mixer import AbstractMixer, Sizes, chunk_products, move


@dataclasses.dataclass(frozen=True)
class ShortConvolution(AbstractMixer):
    """A short convolution between two gates (LFM2, arXiv:2511.23404): the first matrix makes its
    input, by which one gate is multiplied before and the other after it.

    **Attributes:**

    - `conv_size`: how many tokens the convolution covers.
    - `bias`: whether matrices and convolution have a bias.
    """

    kind: ClassVar[str] = "short-convolution"
    divided: ClassVar[tuple[str, ...]] = ("hidden_size",)

    conv_size: Count = 3
    bias: bool = False

    def sizes(self, model: Model) -> Sizes:
        hidden = model.hidden_size
        parameters = Parameters((self.conv_size + 4 * self.bias) * hidden, hidden * self.bias)
        return Sizes(3 * hidden, hidden, hidden, parameters)

    def scan(self, costs: Costs) -> list[Kernel]:
        """The gate before the convolution, in place of a scan."""
        return [move(costs, 3 * costs.model.hidden_size)]


@dataclasses.dataclass(frozen=True)
class LightningAttention(AbstractMixer):
    """Linear attention with a fixed decay for each head, a gate and a norm (MiniMax-01,
    arXiv:2501.08313, section 2.2.1). Its products are those within a chunk, as in attention, and
    those with the state of all chunks before it, and its update (arXiv:2401.04658).

    **Attributes:**

    - `num_heads`: the number of heads of queries, keys and values.
    - `head_size`: their size; by default the hidden size over `num_heads`.
    - `chunk_size`: the chunk size of the scan.
    """

    kind: ClassVar[str] = "lightning-attention"
    divided: ClassVar[tuple[str, ...]] = ("num_heads",)

    num_heads: Count
    head_size: Count | None = None
    chunk_size: Count = 256

    def sizes(self, model: Model) -> Sizes:
        inner = self.num_heads * (self.head_size or model.hidden_size // self.num_heads)
        return Sizes(4 * inner, 0, inner, Parameters(inner))  # A norm of all heads.

    def scan(self, costs: Costs) -> list[Kernel]:
        length = min(self.chunk_size, costs.training.sequence_length)
        size = self.sizes(costs.model).mixed // self.num_heads
        shapes = [(length, length, size), (length, size, length)]
        shapes += [(length, size, size), (size, size, length)]
        return chunk_products(costs, self.num_heads, length, *shapes)


@dataclasses.dataclass(frozen=True)
class Mamba1(AbstractMixer):
    """A Mamba mixer of the first kind (Gu and Dao 2023, arXiv:2312.00752), whose scan computes each
    state by itself: no products of matrices. Two narrow matrices make its step, and the inputs and
    outputs of the states, of what the convolution made.

    A scan moves inputs, steps, gates and outputs. It has an exponential for each state, of which an
    H100 does about as many in a second (16 in a cycle of each of 132 multiprocessors) as it moves
    bytes, so that each is counted as one byte more.

    **Attributes:**

    - `inner_size`: the inner width.
    - `state_size`: the number of states of each of its values.
    - `conv_size`: how many tokens the convolution covers.
    - `step_rank`: the width of the latent of the step.
    - `inner_norms`: whether that latent, and the inputs and outputs of the states, have norms with
        weights (Jamba).
    """

    kind: ClassVar[str] = "mamba-1"
    divided: ClassVar[tuple[str, ...]] = ("inner_size",)

    inner_size: Count
    step_rank: Count
    state_size: Count = 16
    conv_size: Count = 4
    inner_norms: bool = False

    def sizes(self, model: Model) -> Sizes:
        inner, ((latent, _), _) = self.inner_size, self.inner(1)
        # A decay of each state; a skip, the biases of step and convolution, and its taps.
        of_value = self.state_size + 3 + self.conv_size
        parameters = Parameters(inner * of_value, latent * self.inner_norms)
        return Sizes(2 * inner, inner, inner, parameters, summed=latent)

    def inner(self, tp: int) -> list[tuple[int, int]]:
        size = self.inner_size // tp
        return [(self.step_rank + 2 * self.state_size, size), (size, self.step_rank)]

    def scan(self, costs: Costs) -> list[Kernel]:
        values = costs.tokens * self.inner_size // costs.layout.tp
        return [costs.move("elementwise", values * (3 * costs.activation_bytes + self.state_size))]
