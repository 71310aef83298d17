import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from ...data import Count, Layout, Model, Training
from .._block import Kernel, Linear, Open
from .._costs import Costs
from ._base import AbstractPairModule, Parameters
from ._gather import cast, cast_gradient, check_divides, gradients


@dataclasses.dataclass(frozen=True)
class PerLayerInput(AbstractPairModule):
    """An input of a layer besides the hidden states (Gemma 3n, Gemma 4): an embedding of each token
    for this layer, added to a projection of the token's usual embedding. A gate that reads the
    hidden states scales it, and a matrix makes hidden states of it. The gather of those usual
    embeddings in a tensor-parallel group is not counted.

    **Attributes:**

    - `input_size`: the width of the input.
    - `input_vocab_size`: the number of tokens that have an embedding; by default all.
    """

    kind: ClassVar[str] = "per-layer-input"

    input_size: Count
    input_vocab_size: Count | None = None

    def check(self, model: Model, layout: Layout, training: Training) -> None:
        check_divides(layout, "input_size", self.input_size)

    def parameters(self, model: Model) -> Parameters:
        words = self.input_vocab_size or model.vocab_size
        return Parameters(self.input_size * (words + 3 * model.hidden_size))

    def linears(self, costs: Costs) -> Sequence[Linear]:
        tokens, hidden = costs.tokens, costs.model.hidden_size
        width = self.input_size // costs.layout.tp
        shapes = ((width, hidden), (hidden, width), (width, hidden))
        return [costs.linear(tokens, *shape) for shape in shapes]

    def between(
        self, costs: Costs, kernels: list[Kernel], *, backward: bool, weights: bool = True
    ) -> Open:
        *_, projection = self.linears(costs)
        values = costs.tokens * self.input_size // costs.layout.tp
        scaled = costs.move_values("elementwise", (7 if backward else 6) * values)
        # Looks up the rows of the tokens, or adds the gradients to them, in float32.
        size = costs.activation_bytes
        rows = costs.move("embedding", (8 + size if backward else 2 * size) * values)
        if backward:
            open_kernels = [*kernels, scaled, rows, *gradients(projection, weights)]
            return [], [*open_kernels, *cast_gradient(costs, values)]
        return [], [*kernels, projection.forward, rows, scaled, *cast(costs, values)]

    def activations(self, costs: Costs) -> dict[str, float]:
        # The gate before and after its activation, the input, and their product.
        size = 3 * costs.activation_bytes + costs.input_bytes()
        return {"per_layer_input": size * costs.tokens * self.input_size / costs.layout.tp}
