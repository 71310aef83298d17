import dataclasses
from typing import ClassVar, Literal

from ...data import Count, Layout, Model, Training
from .._block import Kernel, Linear, Segment
from .._costs import Costs
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


Activation = Literal["gelu", "squared_relu", "swiglu", "geglu"]


def gate_factor(activation: str) -> int:
    """How many matrices read the input: two with a gate, else one."""
    return 2 if activation in ("swiglu", "geglu") else 1


@dataclasses.dataclass(frozen=True)
class MLP(AbstractModule):
    """Two matrices with an activation between them, or three if the activation has a gate.

    **Attributes:**

    - `ffn_size`: the width between the matrices.
    - `activation`: the activation between the matrices.
    """

    kind: ClassVar[str] = "mlp"

    ffn_size: Count
    activation: Activation = "gelu"

    def check(self, model: Model, layout: Layout, training: Training) -> None:
        check_divides(("tp", layout.tp), "ffn_size", self.ffn_size)

    def parameters(self, model: Model) -> Parameters:
        up = gate_factor(self.activation) * self.ffn_size
        matrices = model.hidden_size * (up + self.ffn_size)
        if not model.bias:
            return Parameters(matrices)
        return Parameters(matrices + up, copied=model.hidden_size)

    def forward(self, costs: Costs, before: list[Kernel]) -> list[Segment]:
        up, down = self._linears(costs)
        tokens, ffn, width = self._shape(costs)
        kernels = [
            *cast(costs, tokens * costs.model.hidden_size),
            up.forward,
            costs.move("elementwise", 2 * tokens * (width + ffn)),
            *cast(costs, tokens * ffn),
            down.forward,
        ]
        rest = close_module(costs, kernels, down.forward)
        return open_module(costs, before, up.forward, rest)

    def backward(
        self, costs: Costs, before: list[Kernel], *, weights: bool = True
    ) -> list[Segment]:
        up, down = self._linears(costs)
        tokens, ffn, width = self._shape(costs)
        kernels = [
            *cast_gradient(costs, tokens * costs.model.hidden_size),
            *gradients(down, weights),
            # Reads the gradient and the inputs of the activation, writes the inputs' gradient.
            costs.move("elementwise", 2 * tokens * (ffn + 2 * width)),
            *cast_gradient(costs, tokens * width),
        ]
        again = self.forward(costs, []) if costs.recomputes("mlp") else []
        rest = close_backward(costs, kernels, up, weights)
        return [*again, *open_module(costs, before, down.dgrad, rest)]

    def backward_weight(self, costs: Costs) -> list[Segment]:
        return weight_gradients(costs, *self._linears(costs))

    def last_product(self, costs: Costs) -> Kernel | None:
        return self._linears(costs)[1].forward

    def activations(self, costs: Costs) -> dict[str, float]:
        tokens, ffn, width = self._shape(costs)
        if costs.recomputes("mlp"):
            return {"mlp": 0}
        return {"mlp": costs.activation_bytes * tokens * (width + ffn)}

    def _shape(self, costs: Costs) -> tuple[int, int, int]:
        """Tokens, width and, with a gate, twice the width of one rank."""
        ffn = self.ffn_size // costs.layout.tp
        return costs.tokens, ffn, gate_factor(self.activation) * ffn

    def _linears(self, costs: Costs) -> tuple[Linear, Linear]:
        tokens, ffn, width = self._shape(costs)
        hidden = costs.model.hidden_size
        return costs.linear(tokens, width, hidden), costs.linear(tokens, hidden, ffn)
