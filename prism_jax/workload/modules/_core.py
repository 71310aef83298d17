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

    - `sequences`, `queries`, `keys`: how many sequences there are, with how many of each.
    - `num_heads`, `kv_heads`: of one GPU.
    - `key_size`, `value_size`: of a head.
    - `window`: how many keys a query sees; all before it by default.
    - `causal`: whether it sees none after it.
    - `first`: where the first of consecutive queries is among the keys; `None` where the queries
        are spread over the sequence so that they see as many keys as all do on average.
    - `ranks`: of a context-parallel group that share the sequence; one has its queries and, of the
        keys, only those of its own tokens.
    """

    sequences: int
    queries: int
    keys: int
    num_heads: int
    kv_heads: int
    key_size: int
    value_size: int
    window: int | None = None
    causal: bool = True
    first: int | None = None
    ranks: int = 1

    @property
    def pairs(self) -> float:
        """Of a query and a key that it sees, in one head of one sequence."""
        if self.first is None:
            seen = self.queries / self.keys * self._pairs_up_to(self.keys)
        else:
            seen = self._pairs_up_to(self.first + self.queries) - self._pairs_up_to(self.first)
        return seen if self.causal else 2 * seen

    def forward(self, costs: Costs) -> list[Kernel]:
        if costs.training.attention != "unfused":
            return [self._fused(costs, backward=False)]
        batch, queries, keys = self._shape
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
            return [self._fused(costs, backward=True)]
        batch, queries, keys = self._shape
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
        batch, queries, keys = self._shape
        if costs.recomputes("core_attn"):
            return {"core_attention": 0}
        if costs.training.attention != "unfused":
            return {"core_attention": 4 * batch * queries}
        return {"core_attention": (5 if costs.model.dropout else 2) * batch * queries * keys}

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self.sequences * self.num_heads, self.queries, self.keys

    def _pairs_up_to(self, end: int) -> float:
        """Of the queries before `end`, each of which sees those before it within the window."""
        window = min(end, end if self.window is None else self.window)
        return window * end - window**2 / 2

    def _fused(self, costs: Costs, *, backward: bool) -> Kernel:
        key_size, value_size, batch = self.key_size, self.value_size, self.sequences
        sizes = f"{key_size}" if key_size == value_size else f"{key_size}+{value_size}"
        size = f"{batch}x{self.num_heads}x{self.queries}x{self.keys}x{sizes}"
        size += "" if self.causal else " all"
        if self.window is not None and self.window < self.keys:
            size += f" window{self.window}"
        size += "" if self.first is None else f" from{self.first}"
        # Two products forward, five backward.
        products = 3 * key_size + 2 * value_size if backward else key_size + value_size
        flop = 2 * batch * self.num_heads * self.pairs * products
        widths = self.num_heads * self.queries + self.kv_heads * self.keys
        num_bytes = (2 if backward else 1) * 2 * batch * widths * (key_size + value_size)
        return costs.attention(size, flop, num_bytes, backward=backward)
