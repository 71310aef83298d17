import dataclasses
from typing import ClassVar

from ...data import Layout, Model, Training
from .._block import Kernel, Linear, Segment
from .._costs import Costs
from .._parts import segment
from ._base import AbstractModule, Parameters
from ._gather import gradients, gradients_of_input, norm_parameters


@dataclasses.dataclass(frozen=True)
class Head(AbstractModule):
    """The last norm, the logits and the cross entropy over the split vocabulary."""

    kind: ClassVar[str] = "head"
    in_residual = False

    def check(self, model: Model, layout: Layout, training: Training) -> None:
        """Any vocabulary can be split, because it is padded."""

    def parameters(self, model: Model) -> Parameters:
        """Includes the last norm. A head that shares the embedding's matrix has none of its own."""
        words = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
        transform = model.hidden_size * (model.hidden_size + 1) + norm_parameters(model)
        return Parameters(words, norm_parameters(model) + model.head_transforms * transform)

    def forward(self, costs: Costs, before: list[Kernel]) -> list[Segment]:
        tokens, hidden, vocabulary = self._shape(costs)
        norm = [*before, costs.norm(), *(one.forward for one in self._transform(costs))]
        logits = [costs.gemm(tokens, vocabulary, hidden, self._dtype(costs))]
        # In float32: conversion, maximum, subtraction, and the sum of exponentials.
        loss = costs.move("loss", 20 * tokens * vocabulary)
        if costs.layout.tp == 1:
            return [segment([*norm, *logits, loss])]
        small = costs.collective("all_reduce", 4 * tokens, costs.tp)
        closing = [segment(logits, small), segment([loss], small), segment([], small)]
        if not costs.splits_sequence:
            return [segment(norm), *closing]
        gather = costs.collective("all_gather", 2 * tokens * hidden, costs.tp)
        return [segment(norm, gather), *closing]

    def backward(
        self, costs: Costs, before: list[Kernel], *, weights: bool = True
    ) -> list[Segment]:
        tokens, hidden, vocabulary = self._shape(costs)
        loss = [*before, costs.move("loss", 10 * tokens * vocabulary)]
        dgrad = costs.gemm(tokens, hidden, vocabulary, self._dtype(costs))
        wgrad = costs.gemm(vocabulary, hidden, tokens, self._dtype(costs), added=True)
        transform = (one for linear in self._transform(costs) for one in gradients(linear, weights))
        norm = segment([*transform, costs.norm(3)])
        num_bytes = 2 * tokens * hidden
        segments = gradients_of_input(costs, loss, [dgrad], [wgrad] if weights else [], num_bytes)
        return [*segments, norm]

    def backward_weight(self, costs: Costs) -> list[Segment]:
        tokens, hidden, vocabulary = self._shape(costs)
        wgrad = costs.gemm(vocabulary, hidden, tokens, self._dtype(costs), added=True)
        kernels = [wgrad, *(linear.wgrad for linear in self._transform(costs))]
        if not costs.splits_sequence:
            return [segment(kernels)]
        gather = costs.collective("all_gather", 2 * tokens * hidden, costs.tp)
        return [segment([], gather), segment(kernels)]

    def activations(self, costs: Costs) -> dict[str, float]:
        """The inputs of the norm and of the head, and the softmax of the logits in float32."""
        tokens, hidden, vocabulary = self._shape(costs)
        states = 2 * costs.activation_bytes * costs.norm_tokens * hidden
        states += 2 * states if costs.model.head_transforms else 0
        return {"head": states, "logits": 4 * tokens * vocabulary}

    def _transform(self, costs: Costs) -> list[Linear]:
        """The dense layer for all tokens on each rank. A pooler takes no time, for one token."""
        if not costs.model.head_transforms:
            return []
        hidden = costs.model.hidden_size
        return [costs.linear(costs.norm_tokens, hidden, hidden, costs.base_dtype)]

    def _dtype(self, costs: Costs) -> str:
        return costs.training.dtype if costs.training.fp8_head else costs.base_dtype

    def _shape(self, costs: Costs) -> tuple[int, int, int]:
        vocabulary = -(-costs.model.vocab_size // costs.layout.tp)  # Padded.
        return costs.tokens, costs.model.hidden_size, vocabulary
