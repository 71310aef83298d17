import dataclasses
from typing import ClassVar

from ...data import Layout, Model, Training
from .._block import Kernel, Segment
from .._costs import Costs
from .._parts import segment
from ._base import AbstractModule, Parameters


@dataclasses.dataclass(frozen=True)
class Embedding(AbstractModule):
    """Token embedding. Each rank of a tensor-parallel group has a part of the vocabulary."""

    kind: ClassVar[str] = "embedding"
    in_residual = False

    def check(self, model: Model, layout: Layout, training: Training) -> None:
        """Any vocabulary can be split, because it is padded."""

    def parameters(self, model: Model) -> Parameters:
        positions = model.max_positions if model.position == "learned" else 0
        return Parameters(model.vocab_size * model.hidden_size, positions * model.hidden_size)

    def forward(self, costs: Costs, before: list[Kernel]) -> list[Segment]:
        values = costs.tokens * costs.model.hidden_size
        kernels = [*before, costs.move("embedding", 4 * values)]
        if costs.model.position == "learned":
            num_bytes = 6 * costs.norm_tokens * costs.model.hidden_size
            kernels.append(costs.move("elementwise", num_bytes))
        if costs.layout.tp == 1:
            return [segment(kernels)]
        kind = "reduce_scatter" if costs.splits_sequence else "all_reduce"
        return [segment(kernels, costs.collective(kind, 2 * values, costs.tp))]

    def backward(
        self, costs: Costs, before: list[Kernel], *, weights: bool = True
    ) -> list[Segment]:
        """Adds the gradients to the rows of the tokens, in float32. Nothing waits for this, but it
        needs the last gradient to arrive, so it belongs to backward-weight.
        """
        if not weights:
            return [segment(before)]
        values = costs.tokens * costs.model.hidden_size
        add = segment([*before, costs.move("embedding", 10 * values)])
        if not costs.splits_sequence:
            return [add]
        return [segment([], costs.collective("all_gather", 2 * values, costs.tp)), add]

    def backward_weight(self, costs: Costs) -> list[Segment]:
        return self.backward(costs, [])

    def activations(self, costs: Costs) -> dict[str, float]:
        # The words themselves, in eight bytes each, and the mask of a dropout.
        mask = costs.norm_tokens * costs.model.hidden_size if costs.model.dropout else 0
        return {"embedding": 8 * costs.tokens + mask}
