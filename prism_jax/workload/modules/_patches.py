"""The ends of a diffusion model of images or videos, which has patches instead of tokens."""

import dataclasses
from typing import ClassVar

from ...data import Count, Layout, Model, Training
from .._block import Kernel, Linear, Segment
from .._costs import Costs
from .._parts import segment
from ._base import AbstractModule, Parameters


@dataclasses.dataclass(frozen=True)
class PatchEmbedding(AbstractModule):
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
    in_residual = False

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

    def forward(self, costs: Costs, before: list[Kernel]) -> list[Segment]:
        return [segment([*before, *(one.forward for one in self._linears(costs))])]

    def backward(
        self, costs: Costs, before: list[Kernel], *, weights: bool = True
    ) -> list[Segment]:
        """Nothing waits for this, so it belongs to backward-weight."""
        if not weights:
            return [segment(before)]
        kernels = (kernel for one in self._linears(costs)[1:] for kernel in (one.dgrad, one.wgrad))
        return [segment([*before, self._linears(costs)[0].wgrad, *kernels])]

    def backward_weight(self, costs: Costs) -> list[Segment]:
        return self.backward(costs, [])

    def activations(self, costs: Costs) -> dict[str, float]:
        values = costs.norm_tokens * self.patch_values
        values += self._context_tokens(costs) * (
            (self.context_size or 0) + 2 * costs.model.hidden_size
        )
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
class PatchHead(AbstractModule):
    """The last norm, which is modulated, the values of each patch, and their mean squared error.

    **Attributes:**

    - `out_values`: the number of output values of a patch: twice `patch_values` if variances are
        predicted too.
    - `own_matrix`: as in `adaln`.
    """

    kind: ClassVar[str] = "patch-head"
    in_residual = False

    out_values: Count
    own_matrix: bool = True

    def check(self, model: Model, layout: Layout, training: Training) -> None:
        """Every rank has the whole head for its own tokens."""

    def parameters(self, model: Model) -> Parameters:
        hidden = model.hidden_size
        modulation = 2 * hidden * (1 + (hidden if self.own_matrix else 0))
        return Parameters(copied=(hidden + 1) * self.out_values + modulation)

    def forward(self, costs: Costs, before: list[Kernel]) -> list[Segment]:
        values = costs.norm_tokens * costs.model.hidden_size
        modulated = [costs.norm(), costs.move("elementwise", 4 * values)]
        kernels = [one.forward for one in self._linears(costs)]
        return [segment([*before, *modulated, *kernels, self._loss(costs)])]

    def backward(
        self, costs: Costs, before: list[Kernel], *, weights: bool = True
    ) -> list[Segment]:
        values = costs.norm_tokens * costs.model.hidden_size
        kernels = [one.dgrad for one in self._linears(costs)]
        kernels += [one.wgrad for one in self._linears(costs)] if weights else []
        modulated = [costs.move("elementwise", 6 * values), costs.norm(3)]
        return [segment([*before, self._loss(costs), *kernels, *modulated])]

    def backward_weight(self, costs: Costs) -> list[Segment]:
        return [segment([one.wgrad for one in self._linears(costs)])]

    def activations(self, costs: Costs) -> dict[str, float]:
        # The input of the norm, its output, what that is made of it, and the prediction.
        values = costs.norm_tokens * (3 * costs.model.hidden_size + self.out_values)
        return {"head": costs.activation_bytes * values}

    def _loss(self, costs: Costs):
        """Reads prediction and target in 16 bits, and writes differences in float32."""
        return costs.move("loss", 8 * costs.norm_tokens * self.out_values)

    def _linears(self, costs: Costs) -> list[Linear]:
        hidden, batch = costs.model.hidden_size, costs.training.microbatch_size
        shapes = [(costs.norm_tokens, self.out_values, hidden)]
        shapes += [(batch, 2 * hidden, hidden)] if self.own_matrix else []
        return [costs.linear(*shape, costs.base_dtype) for shape in shapes]
