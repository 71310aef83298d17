"""What is around a module in a layer: its norms, and its residual. This is one stream, or several,
which manifold-constrained hyper-connections mix (Xie et al. 2025, arXiv:2512.24880): a matrix reads
all streams of a token and makes the weights by which they are summed to the module's input, by
which its output is added to each, and with which they are mixed. Sums and mixtures are one kernel
each, as there (section 4.3.1); the normalisation of the weights, of some values, is not counted.
"""

from ..data import Model
from ._block import Kernel, Linear, weights_of
from ._costs import Costs
from .modules import AbstractModule, Parameters, gradients, norm_parameters


def kernels_before(costs: Costs, module: AbstractModule, norms: int) -> list[Kernel]:
    """What runs before the forward of a module."""
    if not module.in_residual:
        return []
    mixed = [linear.forward for linear in _mixing(costs)]
    return [*mixed, *_moved(costs, 1, 1), *[costs.norm()] * (norms > 0)]


def kernels_after(costs: Costs, module: AbstractModule, norms: int) -> list[Kernel]:
    """What runs after its forward."""
    if not module.in_residual:
        return []
    added = _moved(costs, 2, 1) or [costs.residual()]
    return [*[costs.norm()] * (norms > 1), *added]


def gradients_before(costs: Costs, module: AbstractModule, norms: int) -> list[Kernel]:
    """What runs before the backward of a module."""
    if not module.in_residual:
        return []
    again = costs.recomputes("layernorm") and norms > 0
    added = _moved(costs, 3, 2) or [costs.residual(backward=True)]
    return [*added, *[costs.norm(3)] * (norms > 1), *[costs.norm()] * again]


def gradients_after(
    costs: Costs, module: AbstractModule, norms: int, *, weights: bool
) -> list[Kernel]:
    """What runs after its backward; `weights` as in `AbstractModule.backward`."""
    if not module.in_residual:
        return []
    mixed = [kernel for linear in _mixing(costs) for kernel in gradients(linear, weights)]
    return [*[costs.norm(3)] * (norms > 0), *_moved(costs, 3, 1), *mixed]


def weight_gradients(costs: Costs, module: AbstractModule) -> list[Kernel]:
    """The gradients of its matrix alone."""
    return weights_of(*(_mixing(costs) if module.in_residual else []))


def parameters_around(model: Model, module: AbstractModule, norms: int) -> Parameters:
    """The parameters of its norms and of its mixing of streams: a matrix, a value for each of its
    columns, and three factors.
    """
    if not module.in_residual:
        return Parameters()
    streams = model.hyper_connections
    columns = _columns(streams)
    mixing = columns * (streams * model.hidden_size + 1) + 3 if columns else 0
    return Parameters(copied=norms * norm_parameters(model) + mixing)


def kept_around(costs: Costs, module: AbstractModule, norms: int) -> dict[str, float]:
    """The bytes that are kept for the backward: the input of a norm and, unless it runs again, its
    output; of several streams all of these, and the module's output.
    """
    if not module.in_residual:
        return {}
    output = 0 if costs.recomputes("layernorm") else module.normed_bytes(costs)
    size = norms * costs.activation_bytes + output * (norms > 0)
    if costs.model.hyper_connections > 1:
        size += costs.activation_bytes * (costs.model.hyper_connections + (norms < 2))
    masks = costs.states if costs.model.dropout else 0
    return {"norm": size * costs.states, "dropout": masks}


def _columns(streams: int) -> int:
    """How many values the matrix makes that mixes streams."""
    return (2 + streams) * streams if streams > 1 else 0


def _mixing(costs: Costs) -> list[Linear]:
    streams = costs.model.hyper_connections
    if streams == 1:
        return []
    width = streams * costs.model.hidden_size
    return [costs.linear(costs.norm_tokens, _columns(streams), width, costs.base_dtype)]


def _moved(costs: Costs, of_streams: int, of_module: int) -> list[Kernel]:
    """Moves all streams so many times, and the input or the output of a module."""
    streams = costs.model.hyper_connections
    if streams == 1:
        return []
    return [costs.move("elementwise", 2 * (of_streams * streams + of_module) * costs.states)]
