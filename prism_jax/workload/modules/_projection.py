import dataclasses

from ...data import Layout, Model, Training
from .._block import Kernel, Linear, Segment
from .._costs import Costs
from ._base import AbstractModule, Parameters
from ._embedding import Embedding
from ._gather import (
    close_backward,
    close_module,
    norm_parameters,
    open_module,
    weight_gradients,
)


@dataclasses.dataclass(frozen=True)
class Projection(AbstractModule):
    """The input of a multi-token-prediction layer: the hidden states and the embeddings of the next
    tokens, each after a norm, are concatenated and projected back to the hidden size.
    """

    in_residual = False

    def check(self, model: Model, layout: Layout, training: Training) -> None:
        """Its matrix is split by the hidden size."""

    def parameters(self, model: Model) -> Parameters:
        return Parameters(2 * model.hidden_size**2, copied=2 * norm_parameters(model))

    def forward(self, costs: Costs, before: list[Kernel]) -> list[Segment]:
        linear = self._linear(costs)
        norms = [costs.norm(), costs.norm()]
        rest = close_module(costs, [linear.forward], linear.forward)
        words = Embedding().forward(costs, before)
        return [*words, *open_module(costs, norms, linear.forward, rest)]

    def backward(
        self, costs: Costs, before: list[Kernel], *, weights: bool = True
    ) -> list[Segment]:
        linear = self._linear(costs)
        rest = close_backward(costs, [costs.norm(3), costs.norm(3)], linear, weights)
        words = Embedding().backward(costs, [], weights=weights)
        return [*open_module(costs, before, linear.dgrad, rest), *words]

    def backward_weight(self, costs: Costs) -> list[Segment]:
        words = Embedding().backward_weight(costs)
        return [*weight_gradients(costs, self._linear(costs)), *words]

    def activations(self, costs: Costs) -> dict[str, float]:
        # Inputs and outputs of both norms.
        values = 4 * costs.norm_tokens * costs.model.hidden_size
        words = Embedding().activations(costs)
        return {"projection": costs.activation_bytes * values, **words}

    def _linear(self, costs: Costs) -> Linear:
        hidden = costs.model.hidden_size
        return costs.linear(costs.tokens, hidden, 2 * hidden // costs.layout.tp)
