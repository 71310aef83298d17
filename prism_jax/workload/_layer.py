"""The segments of a layer: those of its modules, with a norm before and a residual after each."""

from ._architecture import Part
from ._block import Kernel, Segment
from ._costs import Costs
from ._parts import segment


def forward_part(costs: Costs, part: Part) -> list[Segment]:
    """The segments of the forward of one layer, or end of the model, and microbatch."""
    costs = costs.of_length(part.sequence_length)
    segments: list[Segment] = []
    before: list[Kernel] = []
    for module in part.modules:
        norm = [costs.norm()] if module.in_residual else []
        segments += module.forward(costs, [*before, *norm])
        before = [costs.residual()] if module.in_residual else []
    return [*segments, segment(before)]


def backward_part(costs: Costs, part: Part, *, again: bool, weights: bool = True) -> list[Segment]:
    """The segments of the backward of one layer, or end of the model, and microbatch. With `again`,
    they include its forward, which is recomputed. Without `weights`, they are those of its phase
    backward-input.
    """
    costs = costs.of_length(part.sequence_length)
    segments = forward_part(costs, part) if again else []
    before: list[Kernel] = []
    for module in reversed(part.modules):
        residual = [costs.residual_backward()] if module.in_residual else []
        if module.in_residual and costs.recomputes("layernorm"):
            residual.append(costs.norm())
        segments += module.backward(costs, [*before, *residual], weights=weights)
        before = [costs.norm(3)] if module.in_residual else []
    return [*segments, segment(before)]


def backward_weight_part(costs: Costs, part: Part) -> list[Segment]:
    """The segments of the gradients of the weights of one layer, or end, and microbatch."""
    costs = costs.of_length(part.sequence_length)
    return [one for module in reversed(part.modules) for one in module.backward_weight(costs)]
