"""The core of attention: scores, their softmax and the weighted sum of the values."""

from typing import NamedTuple

from msgspec.structs import replace

from .._block import Kernel
from .._costs import Costs


# The queries and keys of a tile of the fused kernel: those of FlashAttention-2 for heads of 65 to
# 128 values (flash_fwd_launch_template.h). Shorter sequences leave the rest of a tile unused.
_TILE = (128, 64)


class Core(NamedTuple):
    """The core of attention on one GPU, as one fused kernel or as separate kernels.

    The backward of the fused kernel recomputes the scores itself, so selective recomputation of
    `core_attn` adds nothing to it. A framework that checkpoints the fused kernel all the same (as
    Megatron-LM does if asked to) runs its forward again; this is not included here.

    **Attributes:**

    - `sequences`, `queries`, `keys`: the number of sequences, and of queries and keys in each.
    - `num_heads`, `kv_heads`: the numbers of heads on one GPU.
    - `key_size`, `value_size`: the sizes of a head's keys and values.
    - `window`: how many keys a query attends to; by default all before it.
    - `causal`: whether a query attends to no later keys.
    - `first`: the position among the keys of the first of consecutive queries; `None` if the
        queries are spread over the sequence, so that they attend to as many keys as all queries do
        on average.
    - `ranks`: the number of ranks of a context-parallel group that share the sequence. A rank has
        its own queries, and only the keys of its own tokens.
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
        """The pairs of a query and a key that it attends to, in one head of one sequence."""
        if self.first is None:
            seen = self.queries / self.keys * self._pairs_up_to(self.keys)
        else:
            seen = self._pairs_up_to(self.first + self.queries) - self._pairs_up_to(self.first)
        return seen if self.causal else 2 * seen

    def kernels(self, costs: Costs, *, backward: bool) -> list[Kernel]:
        """The kernels of its forward, or its backward."""
        if costs.training.attention != "unfused":
            return [self._fused(costs, backward=backward)]
        batch, queries, keys = self._shape
        dtype, scores = costs.base_dtype, batch * queries * keys
        dropout = [costs.move("elementwise", 5 * scores)] if costs.model.dropout else []
        if not backward:
            return [
                costs.gemm(queries, keys, self.key_size, dtype, batch),
                costs.move("elementwise", 4 * scores),  # Scale, mask and softmax are one kernel.
                costs.gemm(queries, self.value_size, keys, dtype, batch),
                *dropout,
            ]
        again = self.kernels(costs, backward=False) if costs.recomputes("core_attn") else []
        return [
            *again,
            costs.gemm(keys, self.value_size, queries, dtype, batch),
            costs.gemm(queries, keys, self.value_size, dtype, batch),
            costs.move("elementwise", 6 * scores),
            costs.gemm(queries, self.key_size, keys, dtype, batch),
            costs.gemm(keys, self.key_size, queries, dtype, batch),
            *dropout,
        ]

    def activations(self, costs: Costs) -> dict[str, float]:
        """In bytes: the softmax before and after dropout, or the statistics of the fused kernel."""
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
        """The pairs of the queries before `end`, which attend to the keys before them in the
        window.
        """
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
        unused = max(_TILE[0] / self.queries, 1.0) * max(_TILE[1] / self.keys, 1.0)
        kernel = costs.attention(size, unused * flop, num_bytes, backward=backward)
        return replace(kernel, flop=flop)
