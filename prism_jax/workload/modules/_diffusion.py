"""Modules of diffusion models of images or videos, which have patches instead of tokens."""

import dataclasses
from typing import ClassVar

from ...data import Count, Layout, Model, Training
from .._block import Kernel, Linear, Segments, weights_of
from .._costs import Costs
from .._parts import segment
from ._base import AbstractFirstModule, AbstractSampleModule, Parameters
from ._core import Core, core_of
from ._gather import cast, cast_gradient, check_data_parallel, gradients, norm_parameters


@dataclasses.dataclass(frozen=True)
class AdaLN(AbstractSampleModule):
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

    num_modulated: Count = 2
    own_matrix: bool = True

    def parameters(self, model: Model) -> Parameters:
        width = 3 * self.num_modulated * model.hidden_size
        matrix = model.hidden_size * width if self.own_matrix else 0
        return Parameters(copied=matrix + width - self.num_modulated * norm_parameters(model))

    def activations(self, costs: Costs) -> dict[str, float]:
        # What is shifted and scaled, and what is gated.
        values = self.num_modulated * costs.states
        return {"modulation": 2 * costs.activation_bytes * values}

    def linears(self, costs: Costs) -> list[Linear]:
        """Of one vector for each sequence."""
        if not self.own_matrix:
            return []
        hidden, batch = costs.model.hidden_size, costs.training.microbatch_size
        return [costs.linear(batch, 3 * self.num_modulated * hidden, hidden, costs.base_dtype)]

    def moved(self, costs: Costs, *, backward: bool) -> list[Kernel]:
        # Shifted and scaled, and gated: each read and written. In the backward, of either the
        # gradient and the values are read, and a gradient is written.
        values = (6 if backward else 4) * self.num_modulated * costs.states
        return [costs.move_values("elementwise", values)]


@dataclasses.dataclass(frozen=True)
class PatchEmbedding(AbstractFirstModule):
    """Computes a token from each patch, and the conditioning of the layers: from the time step by
    two matrices, and from a class by a table or from a text by two more matrices. The encoders of
    images and texts are not included; their outputs are read.

    **Attributes:**

    - `patch_values`: the number of values in a patch: its channels times its pixels.
    - `frequency_size`: the number of sines and cosines of a time step.
    - `num_classes`: the number of rows of the table, including the one for no class.
    - `context_size`, `context_length`: the width of a text's tokens, and their number.
    - `shared_modulation`: whether a matrix computes the modulation that layers share, for `adaln`
        modules without matrices of their own.
    """

    kind: ClassVar[str] = "patch-embedding"

    patch_values: Count
    frequency_size: Count = 256
    num_classes: Count | None = None
    context_size: Count | None = None
    context_length: Count | None = None
    shared_modulation: bool = False

    def check(self, model: Model, layout: Layout, training: Training) -> None:
        if (self.context_size is None) != (self.context_length is None):
            raise ValueError(
                "`context_size` and `context_length` of `patch-embedding` belong together; give "
                "both or none."
            )

    def parameters(self, model: Model) -> Parameters:
        hidden = model.hidden_size
        matrices = [self.patch_values, self.frequency_size, hidden]
        matrices += [] if self.context_size is None else [self.context_size, hidden]
        matrices += [hidden] * 6 if self.shared_modulation else []
        total = sum((inputs + 1) * hidden for inputs in matrices)
        return Parameters(copied=total + (self.num_classes or 0) * hidden)

    def forward(self, costs: Costs, before: list[Kernel]) -> Segments:
        return [segment([*before, *(linear.forward for linear in self._linears(costs))])]

    def gradients(self, costs: Costs, before: list[Kernel]) -> Segments:
        of_patches, *linears = self._linears(costs)
        kernels = (kernel for linear in linears for kernel in gradients(linear, True))
        return [segment([*before, *weights_of(of_patches), *kernels])]

    def activations(self, costs: Costs) -> dict[str, float]:
        width = (self.context_size or 0) + 2 * costs.model.hidden_size
        values = costs.norm_tokens * self.patch_values + self._context_tokens(costs) * width
        return {"embedding": costs.activation_bytes * values}

    def _context_tokens(self, costs: Costs) -> int:
        return costs.training.microbatch_size * (self.context_length or 0)

    def _linears(self, costs: Costs) -> list[Linear]:
        """The matrices: first that of the patches, then those of each sequence's vector and of a
        text.
        """
        hidden, batch = costs.model.hidden_size, costs.training.microbatch_size
        shapes = [(costs.norm_tokens, hidden, self.patch_values)]
        shapes += [(batch, hidden, self.frequency_size), (batch, hidden, hidden)]
        shapes += [(batch, 6 * hidden, hidden)] if self.shared_modulation else []
        if self.context_size is not None:
            tokens = self._context_tokens(costs)
            shapes += [(tokens, hidden, self.context_size), (tokens, hidden, hidden)]
        return [costs.linear(*shape, costs.base_dtype) for shape in shapes]


@dataclasses.dataclass(frozen=True)
class PatchHead(AbstractSampleModule):
    """The last norm, which is modulated, the values of each patch, and their mean squared error.

    **Attributes:**

    - `out_values`: the number of output values of a patch: twice `patch_values` if variances are
        predicted too.
    - `own_matrix`: as in `adaln`.
    """

    kind: ClassVar[str] = "patch-head"

    out_values: Count
    own_matrix: bool = True

    def parameters(self, model: Model) -> Parameters:
        hidden = model.hidden_size
        modulation = 2 * hidden * (1 + (hidden if self.own_matrix else 0))
        return Parameters(copied=(hidden + 1) * self.out_values + modulation)

    def activations(self, costs: Costs) -> dict[str, float]:
        # The input of the norm, its output, what that is made of it, and the prediction.
        values = costs.norm_tokens * (3 * costs.model.hidden_size + self.out_values)
        return {"head": costs.activation_bytes * values}

    def moved(self, costs: Costs, *, backward: bool) -> list[Kernel]:
        modulated = costs.move_values("elementwise", (3 if backward else 2) * costs.states)
        # Reads prediction and target, and writes differences in float32.
        loss = costs.move(
            "loss", (2 * costs.activation_bytes + 4) * costs.norm_tokens * self.out_values
        )
        return [costs.norm(3 if backward else 2), modulated, loss]

    def linears(self, costs: Costs) -> list[Linear]:
        hidden, batch = costs.model.hidden_size, costs.training.microbatch_size
        shapes = [(costs.norm_tokens, self.out_values, hidden)]
        shapes += [(batch, 2 * hidden, hidden)] if self.own_matrix else []
        return [costs.linear(*shape, costs.base_dtype) for shape in shapes]


@dataclasses.dataclass(frozen=True)
class StreamBlock(AbstractSampleModule):
    """Attention of the tokens of an image and a text to all of both, and an MLP, with norms that a
    matrix of the block modulates (Esser et al. 2024, arXiv:2403.03206; FLUX.1,
    src/flux/modules/layers.py).

    In a double block (`text_length`) the text and the image are streams with matrices of their own,
    and the MLP follows attention. In a single block the streams are one, and attention and MLP run
    side by side: one matrix reads the input of both, and one makes the output of both.

    **Attributes:**

    - `num_heads`: the number of heads; together they have the hidden size.
    - `ffn_size`: the width of the MLP, whose activation is a GELU.
    - `text_length`: the number of tokens of a text, in a double block.
    """

    kind: ClassVar[str] = "stream-block"

    num_heads: Count
    ffn_size: Count
    text_length: Count | None = None

    def check(self, model: Model, layout: Layout, training: Training) -> None:
        check_data_parallel(self.kind, layout)
        if model.hidden_size % self.num_heads:
            raise ValueError(
                f"`stream-block` has {self.num_heads} heads, which do not divide `hidden_size` = "
                f"{model.hidden_size}; use a divisor."
            )
        length, text = training.sequence_length, self.text_length or 0
        if text >= length:
            raise ValueError(
                f"`stream-block` has a text of {text} of {length} tokens in all, which leaves none "
                "to the image; use a shorter text."
            )

    def parameters(self, model: Model) -> Parameters:
        shapes = [self._modulation(model), *self._shapes(model)]
        matrices = sum(outputs * (inputs + model.bias) for outputs, inputs in shapes)
        # A norm of the queries and keys of each head.
        norms = 2 * model.hidden_size // self.num_heads
        return Parameters(copied=self._streams * (matrices + norms))

    def activations(self, costs: Costs) -> dict[str, float]:
        # Of each norm its input and output, and what is modulated and gated; queries, keys and
        # values, those that are normed, and the output; the MLP's activation and its input.
        hidden = (4 * self._streams + 6) * costs.model.hidden_size
        values = costs.tokens * (hidden + 2 * self.ffn_size)
        kept = self._core(costs).activations(costs)
        return {"stream": costs.activation_bytes * values, **kept}

    def linears(self, costs: Costs) -> list[Linear]:
        batch, linears = costs.training.microbatch_size, []
        for tokens in self._tokens(costs):
            linears.append(costs.linear(batch, *self._modulation(costs.model), costs.base_dtype))
            linears += [costs.linear(tokens, n, k) for n, k in self._shapes(costs.model)]
        return linears

    def moved(self, costs: Costs, *, backward: bool) -> list[Kernel]:
        values, wide = (costs.tokens * n for n in (costs.model.hidden_size, self.ffn_size))
        # Shifted and scaled, and gated, as by `adaln`; queries and keys are rotated.
        sizes = [(6 if backward else 4) * self._streams * values, 4 * values]
        # Streams are joined for attention; or the outputs of attention and MLP for their matrix.
        sizes += [6 * values if self._streams == 2 else 2 * (values + wide)]
        sizes += [(3 if backward else 2) * wide]
        kernels = [costs.move_values("elementwise", size) for size in sizes]
        passes = 3 if backward else 2
        kernels.append(costs.move_values("norm", 2 * passes * values))
        residual = costs.residual(backward=backward)
        kernels += self._streams * [costs.norm(passes), residual]
        for outputs, inputs in self._shapes(costs.model):
            if backward:
                kernels += cast_gradient(costs, costs.tokens * outputs)
            else:
                kernels += cast(costs, costs.tokens * inputs)
        return kernels + self._core(costs).kernels(costs, backward=backward)

    @property
    def _streams(self) -> int:
        """Of a double block, which also modulates two modules, not one."""
        return 2 if self.text_length else 1

    def _tokens(self, costs: Costs) -> list[int]:
        """The tokens of each stream."""
        text = costs.training.microbatch_size * (self.text_length or 0)
        return [text, costs.tokens - text] if text else [costs.tokens]

    def _modulation(self, model: Model) -> tuple[int, int]:
        """The outputs and inputs of the matrix of shifts, scales and gates."""
        return 3 * self._streams * model.hidden_size, model.hidden_size

    def _shapes(self, model: Model) -> list[tuple[int, int]]:
        """The outputs and inputs of the other matrices of a stream."""
        hidden, ffn = model.hidden_size, self.ffn_size
        if self._streams == 1:
            return [(3 * hidden + ffn, hidden), (hidden, hidden + ffn)]
        return [(3 * hidden, hidden), (hidden, hidden), (ffn, hidden), (hidden, ffn)]

    def _core(self, costs: Costs) -> Core:
        size = costs.model.hidden_size // self.num_heads
        return core_of(costs, self.num_heads, self.num_heads, size, size, causal=False)
