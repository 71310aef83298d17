import dataclasses
from typing import ClassVar

from ...data import Count, Layout, Model, Training
from .._block import Kernel, Linear, Segment
from .._costs import Costs
from .._parts import segment
from ._base import AbstractModule, Parameters
from ._gather import gradients, norm_parameters


@dataclasses.dataclass(frozen=True)
class AdaLN(AbstractModule):
    """Adaptive layer norm, which stands before the modules of a layer that it modulates. Their
    norms have no parameters of their own; the shift, the scale and the gate on the output of each
    module depend on the time step and the conditioning (Peebles and Xie 2023, arXiv:2212.09748).

    Every rank of a tensor-parallel group computes all of them.

    **Attributes:**

    - `num_modulated`: how many modules of the layer are modulated.
    - `own_matrix`: whether the layer computes the modulation with a matrix of its own. Otherwise it
        adds a table to the modulation that all layers share, which `patch-embedding` computes.
    """

    kind: ClassVar[str] = "adaln"
    in_residual = False

    num_modulated: Count = 2
    own_matrix: bool = True

    def check(self, model: Model, layout: Layout, training: Training) -> None:
        """Fits any layout, because no part of the module is split."""

    def parameters(self, model: Model) -> Parameters:
        width = 3 * self.num_modulated * model.hidden_size
        matrix = model.hidden_size * width if self.own_matrix else 0
        return Parameters(copied=matrix + width - self.num_modulated * norm_parameters(model))

    def forward(self, costs: Costs, before: list[Kernel]) -> list[Segment]:
        made = [one.forward for one in self._linear(costs)]
        # Shifted and scaled, and gated: each read and written.
        return [segment([*before, *made, costs.move("elementwise", 8 * self._values(costs))])]

    def backward(
        self, costs: Costs, before: list[Kernel], *, weights: bool = True
    ) -> list[Segment]:
        made = (kernel for one in self._linear(costs) for kernel in gradients(one, weights))
        # Of either the gradient and the values are read, and a gradient is written.
        return [segment([*before, costs.move("elementwise", 12 * self._values(costs)), *made])]

    def backward_weight(self, costs: Costs) -> list[Segment]:
        return [segment([one.wgrad for one in self._linear(costs)])]

    def activations(self, costs: Costs) -> dict[str, float]:
        # What is shifted and scaled, and what is gated.
        return {"modulation": 2 * costs.activation_bytes * self._values(costs)}

    def _values(self, costs: Costs) -> int:
        return self.num_modulated * costs.norm_tokens * costs.model.hidden_size

    def _linear(self, costs: Costs) -> list[Linear]:
        """Of one vector for each sequence."""
        if not self.own_matrix:
            return []
        hidden, batch = costs.model.hidden_size, costs.training.microbatch_size
        return [costs.linear(batch, 3 * self.num_modulated * hidden, hidden, costs.base_dtype)]
