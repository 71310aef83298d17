import dataclasses
from typing import ClassVar

from ...data import Count, Model
from .._block import Kernel
from .._costs import Costs
from ._base import Parameters
from ._mixer import AbstractMixer, Sizes, chunk_products


@dataclasses.dataclass(frozen=True)
class GatedDelta(AbstractMixer):
    """A gated delta net: its state forgets by a gate, and what it holds of a key before it takes
    the key's new value (Yang et al. 2024, arXiv:2412.06464); as in Qwen3-Next and Qwen 3.5. With a
    gate for each channel it is Kimi delta attention (arXiv:2510.26692).

    The cost of the scan is that of the products of its chunks, in their order: keys with keys, the
    inverse of the triangle that they leave (of blocks, a quarter of a product), what it makes of
    keys and of values, what the state has of those keys, its update; queries with the state and
    with keys, and with the new values (arXiv:2412.06464, section 3.3). Megatron-LM counts none of
    those within a chunk, and four with the state in place of three (megatron/training/training.py):
    for chunks of 64 and heads of 128 values, 0.72 times as much.

    **Attributes:**

    - `num_key_heads`, `num_value_heads`: the numbers of heads of queries and keys, and of values.
    - `key_head_size`, `value_head_size`: their sizes.
    - `conv_size`: how many tokens the convolution of queries, keys and values covers.
    - `chunk_size`: the chunk size of the scan.
    - `gate_per_channel`: whether each channel of the keys of a head has its own decay.
    - `gate_rank`: the rank of the matrices of that decay, which reads a latent of this width; by
        default they have full rank.
    - `output_gate_rank`: the same of the gate on the output.
    """

    kind: ClassVar[str] = "gated-delta"
    divided: ClassVar[tuple[str, ...]] = ("num_key_heads", "num_value_heads")

    num_key_heads: Count
    num_value_heads: Count
    key_head_size: Count = 128
    value_head_size: Count = 128
    conv_size: Count = 4
    chunk_size: Count = 64
    gate_per_channel: bool = False
    gate_rank: Count | None = None
    output_gate_rank: Count | None = None

    def sizes(self, model: Model) -> Sizes:
        heads, ((decays, _), (values, _)) = self.num_value_heads, self._gates
        convolved = 2 * self.num_key_heads * self.key_head_size + values
        projected = convolved + heads + sum(gate for gate, rank in self._gates if rank is None)
        # Taps, a decay of each head, with a bias of what the gate makes; and the norm of a head.
        parameters = Parameters(convolved * self.conv_size + heads + decays, self.value_head_size)
        return Sizes(
            projected, convolved, values, parameters, sum(rank or 0 for _, rank in self._gates)
        )

    def inner(self, tp: int) -> list[tuple[int, int]]:
        return [(gate // tp, rank) for gate, rank in self._gates if rank]

    def scan(self, costs: Costs) -> list[Kernel]:
        length = min(self.chunk_size, costs.training.sequence_length)
        key, value = self.key_head_size, self.value_head_size
        pairs, values = (length, length, key), (length, value, length)
        inverse, of_state = (length, length, max(length // 4, 1)), (length, value, key)
        shapes = [pairs, inverse, (length, key, length), values, of_state, (key, value, length)]
        return chunk_products(costs, self.num_value_heads, length, *shapes, of_state, pairs, values)

    @property
    def _gates(self) -> tuple[tuple[int, int | None], tuple[int, int | None]]:
        """How many values the gates of decay and output have, and the ranks of their matrices."""
        heads, channels = self.num_value_heads, self.key_head_size if self.gate_per_channel else 1
        values = heads * self.value_head_size
        return (heads * channels, self.gate_rank), (values, self.output_gate_rank)
