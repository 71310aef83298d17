"""The segments of the embedding, before the first layer, and of the head, after the last."""

from ._block import Segment
from ._costs import Costs
from ._layer import backward_weight
from ._parts import segment


def forward_embedding(costs: Costs) -> list[Segment]:
    """Looks up the words; each rank of a tensor-parallel group has a part of the vocabulary."""
    values = costs.tokens * costs.model.hidden_size
    kernels = [costs.move("embedding", 4 * values)]
    if costs.model.position == "learned":
        kernels.append(costs.move("elementwise", 6 * costs.norm_tokens * costs.model.hidden_size))
    if costs.layout.tp == 1:
        return [segment(kernels)]
    kind = "reduce_scatter" if costs.splits_sequence else "all_reduce"
    return [segment(kernels, costs.collective(kind, 2 * values, costs.tp))]


def backward_embedding(costs: Costs) -> list[Segment]:
    """Adds the gradients to the rows of the words, in float32."""
    values = costs.tokens * costs.model.hidden_size
    add = segment([costs.move("embedding", 10 * values)])
    if not costs.splits_sequence:
        return [add]
    return [segment([], costs.collective("all_gather", 2 * values, costs.tp)), add]


def forward_head(costs: Costs) -> list[Segment]:
    """The last norm, the logits and the cross entropy over the split vocabulary."""
    tokens, hidden = costs.tokens, costs.model.hidden_size
    vocabulary = -(-costs.model.vocab_size // costs.layout.tp)  # Padded.
    norm = [costs.move("norm", 4 * costs.norm_tokens * hidden)]
    logits = [costs.gemm(tokens, vocabulary, hidden, costs.base_dtype)]
    # In float32: converted, its maximum found and taken off, its exponential summed.
    loss = costs.move("loss", 20 * tokens * vocabulary)
    if costs.layout.tp == 1:
        return [segment([*norm, *logits, loss])]
    small = costs.collective("all_reduce", 4 * tokens, costs.tp)
    closing = [segment(logits, small), segment([loss], small), segment([], small)]
    if not costs.splits_sequence:
        return [segment(norm), *closing]
    gather = costs.collective("all_gather", 2 * tokens * hidden, costs.tp)
    return [segment(norm, gather), *closing]


def backward_head(costs: Costs, *, weights: bool = True) -> list[Segment]:
    """The gradients of the loss, of the logits and of the last norm.

    Without `weights`, those of the phase backward-input.
    """
    tokens, hidden = costs.tokens, costs.model.hidden_size
    vocabulary = -(-costs.model.vocab_size // costs.layout.tp)  # Padded.
    loss = costs.move("loss", 10 * tokens * vocabulary)
    dgrad = costs.gemm(tokens, hidden, vocabulary, costs.base_dtype)
    wgrad = costs.weight_gemm(vocabulary, hidden, tokens, costs.base_dtype)
    norm = segment([costs.move("norm", 6 * costs.norm_tokens * hidden)])
    if not weights:
        kind = "reduce_scatter" if costs.splits_sequence else "all_reduce"
        bare = costs.collective(kind, 2 * tokens * hidden, costs.tp)
        return [segment([loss, dgrad], bare if costs.layout.tp > 1 else None), norm]
    if costs.layout.tp == 1:
        return [segment([loss, dgrad, wgrad]), norm]
    num_bytes = 2 * tokens * hidden
    if not costs.splits_sequence:
        reduce = costs.collective("all_reduce", num_bytes, costs.tp)
        return [segment([loss, dgrad, wgrad], costs.overlapped(reduce, wgrad)), norm]
    gather = costs.collective("all_gather", num_bytes, costs.tp)
    scatter = costs.collective("reduce_scatter", num_bytes, costs.tp)
    return [
        segment([loss, dgrad], costs.overlapped(gather, dgrad)),
        segment([wgrad], costs.overlapped(scatter, wgrad)),
        norm,
    ]


def backward_weight_head(costs: Costs) -> list[Segment]:
    """The gradient of the weights of the head."""
    tokens, hidden = costs.tokens, costs.model.hidden_size
    vocabulary = -(-costs.model.vocab_size // costs.layout.tp)  # Padded.
    wgrad = costs.weight_gemm(vocabulary, hidden, tokens, costs.base_dtype)
    return backward_weight(costs, None, wgrad)
