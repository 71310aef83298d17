"""The operations of a model, whatever its layout is and whichever kernels do them."""

from msgspec.structs import replace

from ..data import Layout
from ._architecture import LayerPart, parts_of_stages
from ._costs import Costs
from ._parts import rows_of
from ._units import forward_part


def model_flop(job: Costs) -> float:
    """The floating-point operations of a microbatch in a model: its matrix products and, of
    attention, the scores that the mask leaves, each once in the forward and twice in the backward
    of what is trained; of an indexer, what its own backward has; beside adapters, a product of the
    model once. What is computed again does not count.

    So much one GPU computes that has all of the model and of each sequence, by kernels that skip
    what is masked.
    """
    alone = replace(job, layout=Layout(), training=replace(job.training, attention="flash"))
    adapters, sizes = job.training.adapters, ([job.model.num_layers], False)
    (parts,) = parts_of_stages(job.model, *sizes, adapters)
    plain = replace(alone, training=replace(alone.training, adapters=None))
    trained, total = 1 if job.training.forward_only else 3, 0.0
    for part, count in parts:
        total += count * (1 if part.frozen else trained) * _forward_flop(alone, part)
        if trained == 1 or part.frozen:
            continue
        sized = part.costs(plain)
        total -= count * sum(module.skipped_flop(sized) for module in part.modules)
        if adapters is not None:
            total -= count * _forward_flop(plain, part, "gemm")
    return total


def _forward_flop(alone: Costs, part: LayerPart, kind: str = "") -> float:
    """The floating-point operations of the forward of a layer, or of an end of the model, or of
    its kernels of a kind.
    """
    rows = (row for segment in forward_part(alone, part) for row, _ in rows_of(segment))
    kernels = ((kernel, count) for row in rows for kernel, count in row)
    return sum(kernel.flop * count for kernel, count in kernels if kind in ("", kernel.kind))
