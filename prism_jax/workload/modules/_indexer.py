"""The lightning indexer of sparse attention (DeepSeek-V3.2, arXiv:2512.02556, section 2.1):
a narrow attention without values scores all keys before a query, of which the core of attention
then reads the best `top_k`.

It learns by a loss of its own over those keys, and its inputs are detached from the other. So the
backward has scores of the chosen keys alone, and gradients of its matrices, not of its inputs. Its
loss, and the noise that the choice adds to what is read, are not counted. In a tensor-parallel
group each rank has all of it, as in Megatron-LM (experimental_attention_variant/dsa.py).
"""

from typing import NamedTuple

from .._block import Kernel, Linear, weights_of
from .._costs import Costs
from ._core import Core


class Indexer(NamedTuple):
    """An indexer.

    **Attributes:**

    - `num_heads`, `head_size`: the number and the size of the heads of its queries, which share
        their keys.
    - `top_k`: how many keys it chooses for a query.
    - `queries_from`: the width of what its queries are made of.
    - `made`: how many values of a token its keys are made of; by default `head_size`.
    """

    num_heads: int
    head_size: int
    top_k: int
    queries_from: int
    made: int = 0

    @property
    def queries(self) -> int:
        """The width of its queries."""
        return self.num_heads * self.head_size

    def shapes(self, hidden: int) -> list[tuple[int, int]]:
        """What its matrices make and read: of queries, and of keys and the weights of heads."""
        keys = self.made or self.head_size
        return [(self.queries, self.queries_from), (keys + self.num_heads, hidden)]

    def linears(self, costs: Costs) -> list[Linear]:
        """Its matrices."""
        shapes = self.shapes(costs.model.hidden_size)
        return [costs.linear(costs.tokens, *shape) for shape in shapes]

    def scores(self, costs: Costs, core: Core, *, backward: bool) -> list[Kernel]:
        """The scores of queries with all keys of a core, and the choice among them, in float32; or
        the gradients of those that were chosen.
        """
        seen = core._replace(window=self.top_k if backward else None)
        pairs, products = seen.sequences * seen.pairs, 2 if backward else 1
        flop = 2.0 * products * pairs * self.queries
        read = seen.sequences * (seen.queries * self.queries + seen.keys * self.head_size)
        shape = f"{seen.sequences}x{self.num_heads}x{seen.queries}x{seen.keys}x{self.head_size}"
        moved = costs.activation_bytes * products * read + 4 * pairs
        kernel = costs.attention(f"{shape} index{self.top_k}", flop, moved, backward=backward)
        return [kernel] if backward else [kernel, costs.move("elementwise", 4 * pairs)]

    def gradients(self, costs: Costs, core: Core, weights: bool) -> list[Kernel]:
        """Its backward, with the gradients of its matrices if `weights`."""
        kernels = weights_of(*self.linears(costs)) if weights else []
        return [*self.scores(costs, core, backward=True), *kernels]

    def skipped_flop(self, costs: Costs, core: Core) -> float:
        """As in `AbstractModule`."""
        forward = [linear.forward for linear in self.linears(costs)]
        forward += self.scores(costs, core, backward=False)
        backward = self.gradients(costs, core, weights=True)
        return 2 * sum(k.flop for k in forward) - sum(k.flop for k in backward)

    def kept(self, costs: Costs) -> float:
        """The bytes that its backward needs: what its matrices make, and which keys are chosen."""
        values = sum(outputs for outputs, _ in self.shapes(costs.model.hidden_size))
        return costs.tokens * (costs.activation_bytes * values + 4 * self.top_k)
