"""The core of attention: scores, their softmax and the weighted sum of the values; and how the
queries of a rank attend to keys and values of the whole sequence in a context-parallel group:

- `p2p`: blocks of keys and values are sent around a ring, overlapped with the core of the current
    block. In the backward, their gradients are sent around as well (Liu et al. 2023,
    arXiv:2310.01889).
- `all_gather`: keys and values are gathered for the core, and again for its backward, whose
    gradients are scattered (Llama 3, arXiv:2407.21783, section 3.3.2).
- `a2a`: tokens are exchanged for heads and back, so that a rank has all tokens of some heads
    (Jacobs et al. 2023, arXiv:2309.14509).

All sends, activations and copies are as in TransformerEngine 2 (`context_parallel.py`), from which
the names are. With a causal mask, ranks have equal work if each has an early and a late chunk of
the sequence. Without this balance the last rank has the most work, and the others wait for it.
"""

import itertools as it
from typing import NamedTuple

from msgspec.structs import replace

from ...data import Layout, Training
from .._block import Kernel, Open, Result, Segments
from .._costs import Costs
from .._parts import segment


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
    - `packed`: the mean length of the packed sequence that a token is in, to which alone it
        attends; `None` without packing.
    - `masked`: whether a kernel reads a mask, and so covers pairs that it hides.
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
    packed: float | None = None
    ranks: int = 1
    masked: bool = False

    @property
    def pairs(self) -> float:
        """The pairs of a query and a key that it attends to, in one head of one sequence."""
        if self.packed is not None:
            seen = self.queries / self.packed * self._pairs_up_to(self.packed)
        elif self.first is None:
            seen = self.queries / self.keys * self._pairs_up_to(self.keys)
        else:
            seen = self._pairs_up_to(self.first + self.queries) - self._pairs_up_to(self.first)
        return seen if self.causal else 2 * seen

    def kernels(self, costs: Costs, *, backward: bool) -> list[Kernel]:
        """The kernels of its forward, or its backward."""
        if costs.training.attention != "unfused":
            again = backward and costs.recomputes("fused_attn")
            forward = [self._fused(costs, backward=False)] * again
            return [*forward, self._fused(costs, backward=backward)]
        batch, queries, keys = self.sequences * self.num_heads, self.queries, self.keys
        dtype, scores = costs.base_dtype, batch * queries * keys
        size = costs.activation_bytes
        dropout = [costs.move("elementwise", (2 * size + 1) * scores)] * costs.model.dropout
        if not backward:
            return [
                costs.gemm(queries, keys, self.key_size, dtype, batch),
                costs.move_values(
                    "elementwise", 2 * scores
                ),  # Scale, mask and softmax are one kernel.
                costs.gemm(queries, self.value_size, keys, dtype, batch),
                *dropout,
            ]
        again = self.kernels(costs, backward=False) if costs.recomputes("core_attn") else []
        return [
            *again,
            costs.gemm(keys, self.value_size, queries, dtype, batch),
            costs.gemm(queries, keys, self.value_size, dtype, batch),
            costs.move_values("elementwise", 3 * scores),
            costs.gemm(queries, self.key_size, keys, dtype, batch),
            costs.gemm(keys, self.key_size, queries, dtype, batch),
            *dropout,
        ]

    def activations(self, costs: Costs) -> dict[str, float]:
        """In bytes: the softmax before and after dropout, or the statistics of the fused kernel."""
        rows = self.sequences * self.num_heads * self.queries
        if costs.recomputes("core_attn"):
            return {"core_attention": 0}
        if costs.training.attention != "unfused":
            return {"core_attention": 4 * rows}
        size = costs.activation_bytes
        kept = 2 * size + 1 if costs.model.dropout else size
        return {"core_attention": kept * rows * self.keys}

    def results(self, costs: Costs) -> list[Result]:
        """The output of the fused kernel with its statistics, which `by-op` keeps."""
        if costs.training.attention == "unfused":
            return []
        rows = self.sequences * self.num_heads * self.queries
        return [Result((costs.activation_bytes * self.value_size + 4) * rows)]

    def _pairs_up_to(self, end: float) -> float:
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
        size += "" if self.packed is None else f" packed{self.packed:.0f}"
        # Two products forward, five backward.
        products = 3 * key_size + 2 * value_size if backward else key_size + value_size
        flop = 2 * batch * self.num_heads * self.pairs * products
        widths = self.num_heads * self.queries + self.kv_heads * self.keys
        num_bytes = (2 if backward else 1) * batch * widths * (key_size + value_size)
        num_bytes *= costs.activation_bytes
        queries, keys = (min(n, self.packed or n) for n in (self.queries, self.keys))
        unused = max(_TILE[0] / queries, 1.0) * max(_TILE[1] / keys, 1.0)
        sizes = (unused * flop, num_bytes, key_size, self.masked)
        kernel = costs.attention(size, *sizes, backward=backward)
        return replace(kernel, flop=flop)


def core_of(
    costs: Costs,
    num_heads: int,
    kv_heads: int,
    key_size: int,
    value_size: int,
    window: int | None = None,
    causal: bool = True,
) -> Core:
    """The core of self-attention for the queries of one rank or, without balance, the last rank."""
    training, ranks = costs.training, costs.layout.cp
    keys = training.sequence_length
    queries = keys // ranks
    uneven = causal and not training.cp_load_balance and training.cp_comm_type != "a2a"
    first = keys - queries if ranks > 1 and uneven else None
    sizes = (training.microbatch_size, queries, keys, num_heads, kv_heads, key_size, value_size)
    packed = training.packed and training.packed.mean_length(keys)
    return Core(*sizes, window, causal, first, packed, ranks)


def run_core(costs: Costs, core: Core, before: list[Kernel], *, backward: bool) -> Open:
    """The core with its exchanges.

    **Arguments:**

    - `before`: the kernels that compute queries, keys and values; or, in the backward, the gradient
        of the core's output.
    """
    if core.ranks == 1:
        return [], [*before, *core.kernels(costs, backward=backward)]
    (qkv, out), comm_type = _values(core), costs.training.cp_comm_type
    if comm_type == "a2a":
        # The whole sequence, and some of the heads.
        heads, kv_heads = core.num_heads // core.ranks, core.kv_heads // core.ranks
        own_core = core._replace(num_heads=heads, kv_heads=kv_heads, queries=core.keys, ranks=1)
        kernels = own_core.kernels(costs, backward=backward)
        enter, leave = (out, qkv) if backward else (qkv, out)
        return _exchanged(costs, before, enter, kernels, leave)
    if comm_type == "p2p":
        steps = [step.kernels(costs, backward=backward) for step in _steps(core)]
        # Keys and values in all steps but the last, their gradients in all but the first.
        last, sends = ([], 2) if backward else (steps.pop(), 1)
        send = costs.ring(costs.activation_bytes * _kv_values(core), costs.group("cp"))
        sent = sends * (core.ranks - 1) * [send]
        beside = costs.beside(it.chain.from_iterable(steps), *sent)
        # Without balance, only the last rank has a core as long as this one.
        members = None if core.first is None else costs.layout.tp
        ring = segment(before, None, beside, members=members)
        sums = costs.move_values("elementwise", 3 * (qkv if backward else out))
        open_kernels = [*last, *(core.ranks - 1) * [sums]]  # Adds up the results of the steps.
        return _waited(costs, core, [ring], open_kernels)
    gather = segment(before, _over_ranks(costs, core, "all_gather"))
    kernels = [*_sorted(costs, core), *core.kernels(costs, backward=backward)]
    kernels += _sorted(costs, core) if backward else []
    segments, open_kernels = _waited(costs, core, [gather], kernels)
    if not backward:
        return segments, open_kernels
    return [*segments, segment(open_kernels, _over_ranks(costs, core, "reduce_scatter"))], []


def copied_values(costs: Costs, core: Core) -> int:
    """How many values are kept twice: the output of a core is reordered for the next kernel, and
    both orders are kept for the backward.
    """
    return 0 if core.ranks == 1 or costs.training.cp_comm_type == "p2p" else _values(core)[1]


def output_bytes(costs: Costs, values: int) -> float:
    """What is kept of a core's output: one tensor for its own backward and that of the next matrix,
    or two if the matrix multiplies in fewer bits, or reads what a dropout left.
    """
    kept, read = costs.activation_bytes, costs.input_bytes("linear_proj")
    return (kept if read == kept else kept + read) * values


def core_buffers(costs: Costs, core: Core) -> float:
    """The bytes that the backward needs besides gradients: the keys and values of other ranks with
    their gradients, either of all ranks or of those whose blocks are in transit.
    """
    if core.ranks == 1 or costs.training.cp_comm_type == "a2a":
        return 0.0
    blocks = 2 if costs.training.cp_comm_type == "p2p" else core.ranks
    return 2.0 * costs.activation_bytes * blocks * _kv_values(core)


def check_context(
    layout: Layout, training: Training, heads: dict[str, int], window: int | None = None
) -> None:
    """Raises a `ValueError` if attention cannot be split over a context-parallel group.

    **Arguments:**

    - `heads`: the numbers of heads, by their keys in the model.
    - `window`: as in `Core`.
    """
    if layout.cp == 1:
        return
    if training.cp_comm_type == "p2p" and window is not None:
        raise ValueError(
            f"`window` = {window} leaves the steps of a ring unequal work, which is not known "
            'here; use `training.cp_comm_type` = "all_gather" or "a2a".'
        )
    fallback = "p2p" if window is None else "all_gather"
    for key, number in heads.items():
        if training.cp_comm_type == "a2a" and number % (layout.tp * layout.cp) != 0:
            raise ValueError(
                f"`layout.tp`*`layout.cp` = {layout.tp}*{layout.cp} does not divide `model.{key}` "
                f'= {number}, which `training.cp_comm_type` = "a2a" distributes over the ranks; '
                f'use a divisor, or "{fallback}".'
            )


def _values(core: Core) -> tuple[int, int]:
    """The number of values in the queries, keys and values of a rank, and in the core's output."""
    tokens = core.sequences * core.queries
    queries, out = (tokens * core.num_heads * size for size in (core.key_size, core.value_size))
    return queries + _kv_values(core), out


def _kv_values(core: Core) -> int:
    """The number of values in the keys and values of a rank."""
    sizes = core.key_size + core.value_size
    return core.sequences * core.queries * core.kv_heads * sizes


def _steps(core: Core) -> list[Core]:
    """The cores of a ring: with the rank's own keys, and with the keys of each other rank. With
    balance, each of them has half of the pairs under a causal mask; otherwise the last rank attends
    to all keys of the ranks before it.
    """
    packed = core.packed and core.packed / core.ranks  # Of each sequence a rank has a part.
    own_core = core._replace(keys=core.queries, first=None, packed=packed, ranks=1)
    remote = own_core if core.first is None else own_core._replace(causal=False)
    return [own_core, *[remote] * (core.ranks - 1)]


def _over_ranks(costs: Costs, core: Core, kind: str) -> Kernel:
    num_bytes = costs.activation_bytes * core.ranks * _kv_values(core)
    return costs.collective(kind, num_bytes, costs.group("cp"))


def _sorted(costs: Costs, core: Core) -> list[Kernel]:
    """Puts early and late chunks in the order of the sequence, or back."""
    if not (core.causal and costs.training.cp_load_balance):
        return []
    return [costs.move_values("elementwise", 2 * core.ranks * _kv_values(core))]


def _exchanged(
    costs: Costs, before: list[Kernel], enter: int, kernels: list[Kernel], leave: int
) -> Open:
    """Kernels between two all_to_alls of `enter` and `leave` values, each between two copies."""
    copies = [costs.move_values("elementwise", 2 * n) for n in (enter, leave)]
    sent = [
        costs.collective("all_to_all", costs.activation_bytes * number, costs.group("cp"))
        for number in (enter, leave)
    ]
    return [
        segment([*before, copies[0]], sent[0]),
        segment([copies[0], *kernels, copies[1]], sent[1]),
    ], [copies[1]]


def _waited(costs: Costs, core: Core, segments: Segments, left: list[Kernel]) -> Open:
    """Ends the segment of the remaining kernels if they take longer on some ranks than others."""
    if core.first is None:
        return segments, left
    return [*segments, segment(left, members=costs.layout.tp)], []
