import dataclasses
from typing import ClassVar, Literal

from ...data import Count, Layout, Model, Training
from .._block import Kernel, Linear, Open, Result
from .._costs import Costs
from ._base import AbstractPairModule, Parameters, closed
from ._gather import cast, cast_gradient, check_divides
from ._operators import Operator, matrices, matrix


Activation = Literal["gelu", "gelu_new", "relu", "squared_relu", "swiglu", "geglu"]


def gate_factor(activation: str) -> int:
    """How many matrices read the input: two with a gate, else one."""
    return 2 if activation in ("swiglu", "geglu") else 1


@dataclasses.dataclass(frozen=True)
class MLP(AbstractPairModule):
    """Two matrices with an activation between them, or three if the activation has a gate.

    **Attributes:**

    - `ffn_size`: the width between the matrices.
    - `activation`: the activation between the matrices.
    - `bias`: whether the matrices have a bias.
    - `joined_products`: whether one matrix makes the gate and what it scales also where the
        matrices of a stack are separate (`training.separate_products`), as in Phi 3.
    """

    kind: ClassVar[str] = "mlp"

    ffn_size: Count
    activation: Activation = "gelu"
    bias: bool = False
    joined_products: bool = False

    def check(self, model: Model, layout: Layout, training: Training) -> None:
        check_divides(layout, "ffn_size", self.ffn_size)

    def parameters(self, model: Model) -> Parameters:
        up = gate_factor(self.activation) * self.ffn_size
        matrices = model.hidden_size * (up + self.ffn_size)
        if not self.bias:
            return Parameters(matrices)
        return Parameters(matrices + up, copied=model.hidden_size)

    def adapted(self, model: Model) -> dict[str, Parameters]:
        up = gate_factor(self.activation) * self.ffn_size
        names = {"linear_fc1": up, "linear_fc2": self.ffn_size}
        return {name: Parameters(model.hidden_size + size) for name, size in names.items()}

    def linears(self, costs: Costs) -> tuple[Linear, Linear]:
        tokens, ffn, _ = self._shape(costs)
        hidden, outputs = costs.model.hidden_size, [ffn] * gate_factor(self.activation)
        last = costs.linear(tokens, hidden, ffn, name="linear_fc2")
        joined = self.joined_products
        return costs.linears(tokens, outputs, hidden, "linear_fc1", joined=joined), last

    def between(
        self, costs: Costs, kernels: list[Kernel], *, backward: bool, weights: bool = True
    ) -> Open:
        tokens, ffn, width = self._shape(costs)
        if backward:
            # Reads the gradient and the inputs of the activation, writes the inputs' gradient.
            moved = costs.move_values("elementwise", tokens * (ffn + 2 * width))
            return [], [*kernels, moved, *cast_gradient(costs, tokens * width)]
        moved = costs.move_values("elementwise", tokens * (width + ffn))
        return [], [*kernels, moved, *cast(costs, tokens * ffn)]

    def last_product(self, costs: Costs) -> Kernel | None:
        return self.linears(costs)[1].forward

    def operators(self, costs: Costs) -> list[Operator]:
        ffn, hidden, gates = self.ffn_size, costs.model.hidden_size, gate_factor(self.activation)
        separate = costs.training.separate_products and not self.joined_products
        outputs = (ffn,) * gates if separate else (gates * ffn,)
        activation = "swiglu" if gates > 1 else self.activation
        between = {"f": costs.tokens * ffn}
        return [
            *matrices(costs, outputs, hidden, "linear_fc1", biased=self.bias),
            *[Operator("joined-gates", between)] * (gates > len(outputs)),
            Operator(activation, between),
            *matrix(costs, (ffn, hidden), "linear_fc2", biased=self.bias),
        ]

    def results(self, costs: Costs) -> list[Result]:
        first, last = self.linears(costs)
        return [*first.results, *closed(costs, last)]

    def normed_bytes(self, costs: Costs) -> float:
        return costs.input_bytes("linear_fc1")

    def activations(self, costs: Costs) -> dict[str, float]:
        tokens, ffn, width = self._shape(costs)
        if costs.recomputes("mlp"):
            return {"mlp": 0}
        return {
            "mlp": tokens * (costs.activation_bytes * width + costs.input_bytes("linear_fc2") * ffn)
        }

    def _shape(self, costs: Costs) -> tuple[int, int, int]:
        """Tokens, width and, with a gate, twice the width of one rank."""
        ffn = self.ffn_size // costs.layout.tp
        return costs.tokens, ffn, gate_factor(self.activation) * ffn
