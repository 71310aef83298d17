"""The ends of a language model, and the input of a multi-token-prediction layer."""

import dataclasses
from typing import ClassVar

from ...data import Model
from .._block import Kernel, Linear, Segments, weights_of
from .._costs import Costs
from .._parts import segment
from ._base import AbstractFirstModule, AbstractModule, Parameters
from ._gather import (
    close_backward,
    close_module,
    gather_states,
    gradients,
    norm_parameters,
    open_module,
    tp_bytes,
    weight_gradients,
)
from ._operators import Operator, matrices, norm_name


@dataclasses.dataclass(frozen=True)
class Embedding(AbstractFirstModule):
    """Token embedding. Each rank of a tensor-parallel group has a part of the vocabulary, of
    whatever size, because it is padded.
    """

    kind: ClassVar[str] = "embedding"

    def parameters(self, model: Model) -> Parameters:
        positions = model.max_positions if model.position == "learned" else 0
        return Parameters(model.vocab_size * model.hidden_size, positions * model.hidden_size)

    def forward(self, costs: Costs, before: list[Kernel]) -> Segments:
        kernels = [*before, costs.move("embedding", 2 * tp_bytes(costs))]
        if costs.model.position == "learned":
            kernels.append(costs.move_values("elementwise", 3 * costs.states))
        return close_module(costs, kernels)

    def gradients(self, costs: Costs, before: list[Kernel]) -> Segments:
        """Adds the gradients to the rows of the tokens, in float32."""
        values = costs.tokens * costs.model.hidden_size
        add = segment([*before, costs.move("embedding", tp_bytes(costs) + 8 * values)])
        if not costs.splits_sequence:
            return [add]
        return [segment([], gather_states(costs)), add]

    def operators(self, costs: Costs) -> list[Operator]:
        model = costs.model
        around = {"h": costs.states, "t": costs.tokens}
        words = {**around, "w": model.vocab_size * model.hidden_size}
        return [
            *(Operator("start", around), Operator("embedding", words)),
            *[Operator("positions", around)] * (model.position == "learned"),
            *[Operator("tied", words)] * model.tied_embeddings,
        ]

    def activations(self, costs: Costs) -> dict[str, float]:
        # The words themselves, in eight bytes each, and the mask of a dropout.
        mask = costs.states if costs.model.dropout else 0
        return {"embedding": 8 * costs.tokens + mask}


@dataclasses.dataclass(frozen=True)
class Projection(AbstractModule):
    """The input of a multi-token-prediction layer: the hidden states and the embeddings of the next
    tokens, each after a norm, are concatenated and projected back to the hidden size.
    """

    in_residual = False

    def parameters(self, model: Model) -> Parameters:
        return Parameters(2 * model.hidden_size**2, copied=2 * norm_parameters(model))

    def forward(self, costs: Costs, before: list[Kernel]) -> Segments:
        linear = self._linear(costs)
        norms = [costs.norm(), costs.norm()]
        segments = close_module(costs, [linear.forward], linear.forward)
        words = Embedding().forward(costs, before)
        return [*words, *open_module(costs, norms, linear.forward, segments)]

    def backward(self, costs: Costs, before: list[Kernel], *, weights: bool = True) -> Segments:
        linear = self._linear(costs)
        segments = close_backward(costs, [costs.norm(3), costs.norm(3)], linear, weights)
        words = Embedding().backward(costs, [], weights=weights)
        return [*open_module(costs, before, linear.dgrad, segments), *words]

    def backward_weight(self, costs: Costs) -> Segments:
        words = Embedding().backward_weight(costs)
        return [*weight_gradients(costs, self._linear(costs)), *words]

    def activations(self, costs: Costs) -> dict[str, float]:
        # Inputs and outputs of both norms.
        values = 4 * costs.states
        words = Embedding().activations(costs)
        return {"projection": costs.activation_bytes * values, **words}

    def _linear(self, costs: Costs) -> Linear:
        hidden = costs.model.hidden_size
        return costs.linear(costs.tokens, hidden, 2 * hidden // costs.layout.tp)


@dataclasses.dataclass(frozen=True)
class Head(AbstractModule):
    """The last norm, the logits and the cross entropy over the split, and so padded, vocabulary."""

    kind: ClassVar[str] = "head"
    in_residual = False

    def parameters(self, model: Model) -> Parameters:
        """Includes the last norm, and the sum of residual streams. A head that shares the
        embedding's matrix has none of its own.
        """
        words = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
        transform = model.hidden_size * (model.hidden_size + 1) + norm_parameters(model)
        copied = norm_parameters(model) + model.head_transforms * transform
        streams = model.hyper_connections
        # A matrix makes the weights by which streams are summed, each with a bias, and one factor.
        summed = streams * (streams * model.hidden_size + 1) + 1 if streams > 1 else 0
        return Parameters(words, copied + summed)

    def forward(self, costs: Costs, before: list[Kernel]) -> Segments:
        tokens, _, vocabulary = self._shape(costs)
        norm = [*before, costs.norm(), *(linear.forward for linear in self._transform(costs))]
        logits = [self._words(costs).forward]
        # In float32: conversion, maximum, subtraction, and the sum of exponentials.
        moved = 14 if costs.training.in_float32 else 20
        loss = costs.move("loss", moved * tokens * vocabulary)
        if costs.layout.tp == 1:
            return [segment([*norm, *logits, loss])]
        small = costs.collective("all_reduce", 4 * tokens, costs.group("tp"))
        closing = [segment(logits, small), segment([loss], small), segment([], small)]
        if not costs.splits_sequence:
            return [segment(norm), *closing]
        return [segment(norm, gather_states(costs)), *closing]

    def backward(self, costs: Costs, before: list[Kernel], *, weights: bool = True) -> Segments:
        tokens, _, vocabulary = self._shape(costs)
        moved = 8 if costs.training.in_float32 else 10
        loss = [*before, costs.move("loss", moved * tokens * vocabulary)]
        transform = (
            kernel for linear in self._transform(costs) for kernel in gradients(linear, weights)
        )
        segments = close_backward(costs, loss, self._words(costs), weights)
        return [*segments, segment([*transform, costs.norm(3)])]

    def backward_weight(self, costs: Costs) -> Segments:
        kernels = weights_of(self._words(costs), *self._transform(costs))
        if not (costs.splits_sequence and kernels):
            return [segment(kernels)]
        return [segment([], gather_states(costs)), segment(kernels)]

    def operators(self, costs: Costs) -> list[Operator]:
        tokens, hidden, vocabulary = self._shape(costs)
        logits = {"v": tokens * vocabulary, "t": tokens}
        return [
            Operator(norm_name(costs.model), {"h": costs.states, "t": tokens}),
            *matrices(costs, (vocabulary,), hidden, biased=False),
            *(Operator("logits", logits), Operator("loss", logits)),
        ]

    def activations(self, costs: Costs) -> dict[str, float]:
        """The inputs of the norm and of the head, and what the loss keeps."""
        tokens, hidden, vocabulary = self._shape(costs)
        states = 2 * costs.activation_bytes * costs.norm_tokens * hidden
        states += 2 * states if costs.model.head_transforms else 0
        _, kept, _ = costs.logit_bytes
        return {"head": states, "logits": kept * tokens * vocabulary / costs.training.loss_chunks}

    def _transform(self, costs: Costs) -> list[Linear]:
        """The dense layer for all tokens on each rank, and the matrix that sums streams. A pooler
        takes no time, for one token.
        """
        hidden, streams = costs.model.hidden_size, costs.model.hyper_connections
        shapes = [(hidden, hidden)] if costs.model.head_transforms else []
        shapes += [(streams, streams * hidden)] if streams > 1 else []
        return [costs.linear(costs.norm_tokens, *shape, costs.base_dtype) for shape in shapes]

    def _words(self, costs: Costs) -> Linear:
        """The matrix that makes the logits."""
        tokens, hidden, vocabulary = self._shape(costs)
        dtype = costs.training.dtype if costs.training.fp8_head else costs.base_dtype
        return costs.linear(tokens, vocabulary, hidden, dtype)

    def _shape(self, costs: Costs) -> tuple[int, int, int]:
        vocabulary = -(-costs.model.vocab_size // costs.layout.tp)  # Padded.
        return costs.tokens, costs.model.hidden_size, vocabulary
