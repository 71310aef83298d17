"""The core of attention: scores, their softmax and the weighted sum of the values."""

from typing import NamedTuple

from .._block import Kernel
from .._costs import Costs


class Core(NamedTuple):
    """The core of attention on one GPU, as one fused kernel or as its parts.

    The backward of the fused kernel computes the scores again by itself, so a selective recompute
    of `core_attn` adds nothing to it. Where a framework checkpoints the fused kernel all the same
    (Megatron-LM does if asked to), its forward runs once more, which is not in here.

    **Attributes:**

    - `num_heads`, `kv_heads`: of one GPU.
    - `key_size`, `value_size`: of a head.
    - `window`: how many keys a query sees; all before it by default.
    - `causal`: whether it sees none after it.
    - `context`: how many keys there are, where they are not those of the sequence.
    """

    num_heads: int
    kv_heads: int
    key_size: int
    value_size: int
    window: int | None = None
    causal: bool = True
    context: int | None = None

    def forward(self, costs: Costs) -> list[Kernel]:
        if costs.training.attention != "unfused":
            return [costs.attention(*self, backward=False)]
        batch, queries, keys = self._shape(costs)
        dtype, scores = costs.base_dtype, batch * queries * keys
        kernels = [
            costs.gemm(queries, keys, self.key_size, dtype, batch),
            costs.move("elementwise", 4 * scores),  # Scale, mask and softmax are one kernel.
            costs.gemm(queries, self.value_size, keys, dtype, batch),
        ]
        if costs.model.dropout:
            kernels.append(costs.move("elementwise", 5 * scores))
        return kernels

    def backward(self, costs: Costs) -> list[Kernel]:
        if costs.training.attention != "unfused":
            return [costs.attention(*self, backward=True)]
        batch, queries, keys = self._shape(costs)
        dtype, scores = costs.base_dtype, batch * queries * keys
        kernels = self.forward(costs) if costs.recomputes("core_attn") else []
        kernels += [
            costs.gemm(keys, self.value_size, queries, dtype, batch),
            costs.gemm(queries, keys, self.value_size, dtype, batch),
            costs.move("elementwise", 6 * scores),
            costs.gemm(queries, self.key_size, keys, dtype, batch),
            costs.gemm(keys, self.key_size, queries, dtype, batch),
        ]
        if costs.model.dropout:
            kernels.append(costs.move("elementwise", 5 * scores))
        return kernels

    def activations(self, costs: Costs) -> dict[str, float]:
        """In bytes: the softmax and what dropout makes of it, or the fused kernel's statistics."""
        batch, queries, keys = self._shape(costs)
        if costs.recomputes("core_attn"):
            return {"core_attention": 0}
        if costs.training.attention != "unfused":
            return {"core_attention": 4 * batch * queries}
        return {"core_attention": (5 if costs.model.dropout else 2) * batch * queries * keys}

    def _shape(self, costs: Costs) -> tuple[int, int, int]:
        training = costs.training
        queries, keys = training.sequence_length // costs.layout.cp, training.sequence_length
        keys = keys if self.context is None else self.context
        return training.microbatch_size * self.num_heads, queries, keys
