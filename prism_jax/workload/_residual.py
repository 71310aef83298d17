"""What is around a module in a layer: its norms, and its residual. This is one stream, or several,
which manifold-constrained hyper-connections mix (Xie et al. 2025, arXiv:2512.24880): a matrix reads
all streams of a token and makes the weights by which they are summed to the module's input, by
which its output is added to each, and with which they are mixed. Sums and mixtures are one kernel
each, as there (section 4.3.1); the normalisation of the weights, of some values, is not counted.
"""

from typing import NamedTuple

from ..data import Model
from ._block import Kernel, Linear
from ._costs import Costs
from .modules import AbstractModule, Parameters, gradients, norm_parameters


class Around(NamedTuple):
    """The kernels around a module, in its forward and in its backward."""

    before: list[Kernel]
    after: list[Kernel]
    before_gradients: list[Kernel]
    after_gradients: list[Kernel]


def around(costs: Costs, module: AbstractModule, norms: int, *, weights: bool = True) -> Around:
    """What runs around a module with so many norms; `weights` as in `AbstractModule.backward`."""
    if not module.in_residual:
        return Around([], [], [], [])
    first, last = norms > 0, norms > 1
    again = [costs.norm()] * (first and costs.recomputes("layernorm"))
    mixing = mixing_of(costs, module)
    forward = [linear.forward for linear in mixing]
    mixed = [kernel for linear in mixing for kernel in gradients(linear, weights)]
    added = _moved(costs, 2, 1) or [costs.residual()]
    parted = _moved(costs, 3, 2) or [costs.residual(backward=True)]
    return Around(
        [*forward, *_moved(costs, 1, 1), *[costs.norm()] * first],
        [*[costs.norm()] * last, *added],
        [*parted, *[costs.norm(3)] * last, *again],
        [*[costs.norm(3)] * first, *_moved(costs, 3, 1), *mixed],
    )


def mixing_of(costs: Costs, module: AbstractModule) -> list[Linear]:
    """The matrix that reads all streams, if there are several."""
    streams = costs.model.hyper_connections
    if streams == 1 or not module.in_residual:
        return []
    width = streams * costs.model.hidden_size
    return [costs.linear(costs.norm_tokens, (2 + streams) * streams, width, costs.base_dtype)]


def parameters_around(model: Model, module: AbstractModule, norms: int) -> Parameters:
    """The parameters of its norms, and of that matrix with a value for each of its columns and
    three factors.
    """
    if not module.in_residual:
        return Parameters()
    streams = model.hyper_connections
    mixing = (2 + streams) * streams * (streams * model.hidden_size + 1) + 3
    return Parameters(copied=norms * norm_parameters(model) + mixing * (streams > 1))


def kept_around(costs: Costs, module: AbstractModule, norms: int) -> dict[str, float]:
    """The bytes that are kept for the backward: the input of a norm and, unless it runs again, its
    output; of several streams all of these, and the module's output.
    """
    if not module.in_residual:
        return {}
    output = 0 if costs.recomputes("layernorm") else module.normed_bytes(costs)
    size = norms * costs.activation_bytes + output * (norms > 0)
    if (streams := costs.model.hyper_connections) > 1:
        size += costs.activation_bytes * (streams + (norms < 2))
    masks = costs.states if costs.model.dropout else 0
    return {"norm": size * costs.states, "dropout": masks}


def _moved(costs: Costs, of_streams: int, of_module: int) -> list[Kernel]:
    """Moves all streams, if there are several, so many times, and the input or the output of a
    module.
    """
    streams = costs.model.hyper_connections
    values = (of_streams * streams + of_module) * costs.states
    return [costs.move_values("elementwise", values)] if streams > 1 else []
