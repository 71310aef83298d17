"""Fits the tables of kernels by shape to measured latencies."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Float, Int

from ..data import Product, ShapeTable, Term, column, parse_product


Columns = Mapping[str, Any]

# Rows of a shape are in one fold, so that each is predicted from other shapes.
NUM_FOLDS = 5
# The penalty on the curvature of a term, and one that makes the sum of terms unique: both in rows.
_CURVATURE = 0.1
_SIZE = 1e-4
# Residuals beyond this many standard deviations count less: some kernels ran with a bad choice of
# tiles.
_OUTLYING = 2.5
_ROUNDS = 4
_SMALL = 0.2


@dataclasses.dataclass(frozen=True)
class ShapeKind:
    """What the latency of a kind of kernel depends on.

    **Attributes:**

    - `columns`: the sizes that a row has.
    - `work`: the product that the latency is proportional to at large sizes.
    - `terms`: products, and how many knots each has.
    - `large`: the work from which on a row counts whole; one with less counts as `_SMALL`.
    """

    columns: tuple[str, ...]
    work: str
    terms: tuple[tuple[str, int], ...]
    large: float = 0.0


def _kind(columns: str, work: str, terms: str, large: float = 0.0) -> ShapeKind:
    words = terms.split()
    pairs = zip(words[::2], map(int, words[1::2]), strict=True)
    return ShapeKind(tuple(columns.split()), work, tuple(pairs), large)


_ROWS = "tokens*topk/ep"  # Of a GPU with balanced experts.
KINDS = {
    "gemm": _kind(
        "m n k", "m*n*k", "m 6 n 8 k 8 m*n 8 m*n*k 10 n*k 6 m*k 6 m*n/tiles256x128 4", 5e9
    ),
    "mla": _kind(
        "batch sequence heads",
        "batch*heads*sequence*sequence",
        "batch 5 sequence 6 batch*heads 6 batch*heads*sequence 6 batch*sequence 6 "
        "batch*heads*sequence*sequence 8",
    ),
    "experts": _kind(
        "tokens hidden width topk experts ep matrices",
        f"{_ROWS}*hidden*width*matrices",
        "tokens*topk/experts 8 width 10 experts/ep 7 ep 5 hidden 6 topk 4 matrices 2 tokens 5 "
        f"{_ROWS} 7 {_ROWS}*hidden*width 8 {_ROWS}*width 8 experts*hidden*width/ep 10 "
        "hidden*width 10 experts*width/ep 8",
    ),
}
for _name in ("attention_causal", "attention_window", "attention_full"):
    KINDS[_name] = _kind(
        "batch sequence heads kv_heads pairs",
        "batch*heads*pairs",
        "batch 4 sequence 5 heads 4 heads/kv_heads 4 batch*heads*sequence 6 batch*heads*pairs 7 "
        "batch*kv_heads*sequence 4",
    )
for _name in ("all_gather", "all_reduce", "all_to_all", "reduce_scatter"):
    KINDS[_name] = _kind("bytes gpus", "bytes", "bytes 10 gpus 3 bytes/gpus 8")
for _name in ("deepep_dispatch", "deepep_combine"):
    KINDS[_name] = _kind(
        "tokens hidden topk experts sms",
        "tokens",
        "tokens 6 hidden 3 topk 4 experts 3 sms 5 tokens*hidden*topk 6 tokens*sms 5",
    )
    KINDS[f"{_name}_nodes"] = _kind(
        "nodes tokens sms", "tokens", "nodes 3 tokens 3 sms 4 nodes*sms 5 nodes*tokens 4"
    )
# Calls of training, of which PyTorch's are kept apart by a name after a colon.
KINDS["batched_gemm"] = _kind(
    "count m n k",
    "count*m*n*k",
    "count 4 m 5 n 7 k 7 count*m*n 6 count*m*n*k 7",
)
# The kernels of FlashAttention compute with heads whose size is a multiple of 32.
KINDS["flash_attention"] = _kind(
    "sequences sequence head_dim padded",
    "sequences*sequence*sequence*head_dim",
    "sequences 4 sequence 5 head_dim 7 sequences*sequence 6 sequences*sequence*sequence*head_dim 6 "
    "padded/head_dim 4 padded 8",
)
KINDS["rowwise"] = _kind("rows width", "rows*width", "width 6 rows*width 8")
KINDS["embedding"] = _kind(
    "tokens hidden vocab",
    "tokens*hidden",
    "tokens 8 hidden 8 tokens*hidden 10 vocab 5 vocab*hidden 6 tokens/vocab 6",
)
for _name in ("all_gather_nodes", "all_reduce_nodes", "send_recv_nodes"):
    # Beyond the largest number of nodes, the bandwidth of what a GPU sends stays.
    KINDS[_name] = _kind(
        "sent nodes gpus_per_node", "sent", "sent 8 nodes 3 gpus_per_node 3 nodes*sent 4"
    )
for _name in (
    *("prepare_two_sided", "dispatch_one_sided", "dispatch_two_sided", "combine_one_sided"),
    *("combine_two_sided", "combine_low_precision_two_sided"),
):
    KINDS[f"nvlink_{_name}"] = _kind("tokens ep", "tokens", "tokens 6 ep 6 tokens*ep 6")


def find_kind(kernel: str) -> ShapeKind:
    """What a kernel depends on. What follows a colon in its name keeps implementations apart."""
    return KINDS[kernel.partition(":")[0]]


def attention_sizes(
    mode: str, batch: Any, sequence: Any, heads: Any, kv_heads: Any, window: Any
) -> dict[str, Any]:
    """The columns of a table of attention, whose `mode` is `full`, `causal` or `window`; of
    numbers, or of arrays.
    """
    width = np.minimum(window, sequence) if mode == "window" else sequence
    pairs = sequence * sequence if mode == "full" else sequence * width - width * width / 2
    sizes = {"batch": batch, "sequence": sequence, "heads": heads, "kv_heads": kv_heads}
    return {**sizes, "pairs": pairs}


def _terms_of(kernel: str, dtype: str, sms: int) -> tuple[tuple[str, int], ...]:
    """The terms of a kernel, with the waves of a product's tiles where that number is known."""
    terms = find_kind(kernel).terms
    if kernel.partition(":")[0] != "gemm" or not sms:
        return terms
    if dtype != "fp8_block":
        return (*terms, (f"waves256x128x{sms}", 5))
    # On Hopper, DeepGEMM takes up to 2.7 times as long where tiles of 128 by 192 are one wave and
    # those of 128 by 128 are two.
    waves = ((f"waves{tile}x{sms}", 5) for tile in ("128x128", "128x192", "256x128"))
    return (*terms, *waves, ("tiles128x192", 9), ("tiles256x128", 9))


@dataclasses.dataclass(frozen=True)
class MeasuredLatencies:
    """Measured latencies of a kernel.

    **Attributes:**

    - `kernel`, `dtype`, `case`: which table they belong to, as in `ShapeTable`.
    - `columns`: the sizes of the measured shapes.
    - `seconds`: their latencies.
    """

    kernel: str
    dtype: str
    case: float
    columns: Columns
    seconds: Float[np.ndarray, " rows"]

    def sizes(self) -> dict[str, Float[np.ndarray, " rows"]]:
        """The columns that the kernel's table has."""
        return {
            name: np.asarray(self.columns[name], float) for name in find_kind(self.kernel).columns
        }

    def only(self, rows: np.ndarray) -> "MeasuredLatencies":
        """Some of the rows, with the columns that the kernel's table has."""
        columns = {name: values[rows] for name, values in self.sizes().items()}
        return dataclasses.replace(self, columns=columns, seconds=self.seconds[rows])


def fit_shapes(measured: MeasuredLatencies, sms: int = 0) -> ShapeTable:
    """Fits the table of a kernel, by least squares of logarithms in which outliers count less.

    **Arguments:**

    - `measured`: the latencies.
    - `sms`: the device's multiprocessors, for the waves of a product's tiles; 0 if not known.

    **Returns:**

    The table. Over these rows, the weighted mean error of its logarithm is zero.
    """
    kind, sizes = find_kind(measured.kernel), measured.sizes()
    ranges = {name: (float(x.min()), float(x.max())) for name, x in sizes.items()}
    terms = []
    for text, most in _terms_of(measured.kernel, measured.dtype, sms):
        product = parse_product(text)
        logs = _logs(product, sizes)
        low, high, knots = float(logs.min()), float(logs.max()), len(np.unique(logs.round(9)))
        if text.startswith("waves"):
            low, high = 0.0, (most - 1) * math.log(2)
        elif text.startswith("tiles"):
            low, high = math.log(sms / 4), math.log(sms * 4)
        if knots > 1 and high - low > 1e-6:
            terms.append(Term(product, low, high, (0.0,) * min(knots, most)))
    work = parse_product(kind.work)
    labels = (measured.kernel, measured.dtype, measured.case, work)
    table = ShapeTable(*labels, 0.0, tuple(terms), ranges)
    log_work = _logs(work, sizes)
    weights = np.where(log_work >= math.log(max(kind.large, 1.0)), 1.0, _SMALL)
    constant, values = _solve(table, sizes, np.log(measured.seconds) - log_work, weights)
    steps = np.split(values, np.cumsum([len(term.values) for term in terms])[:-1])
    fitted = tuple(
        msgspec.structs.replace(term, values=tuple(map(float, step)))
        for term, step in zip(terms, steps, strict=False)
    )
    return ShapeTable(*labels, constant, fitted, ranges)


def cross_validate(measured: MeasuredLatencies, sms: int = 0) -> Float[np.ndarray, " rows"]:
    """The logarithms of predicted over measured latencies, each of a table that was fitted without
    that shape and a fifth of the others; NaN if there are fewer than two shapes.
    """
    sizes = measured.sizes()
    fold = _folds(np.stack(list(sizes.values()), -1))
    errors = np.full(len(fold), np.nan)
    for i in np.unique(fold) if fold.any() else ():
        kept, left_out = measured.only(fold != i), measured.only(fold == i)
        table = fit_shapes(kept, sms)
        errors[fold == i] = np.log(shape_latencies(table, left_out.columns) / left_out.seconds)
    return errors


def _folds(shapes: Float[np.ndarray, "rows columns"]) -> Int[np.ndarray, " rows"]:
    """A fold for each row, the same for all rows of a shape."""
    _, index = np.unique(shapes, axis=0, return_inverse=True)
    order = np.random.default_rng(0).permutation(index.max() + 1)
    return order[index.ravel()] % NUM_FOLDS


def shape_latencies(table: ShapeTable, columns: Columns) -> Float[np.ndarray, " rows"]:
    """The latencies of many shapes, in seconds; each as `shape_latency` gives it."""
    raised = {
        name: np.maximum(np.asarray(columns[name], float), low)
        for name, (low, _) in table.ranges.items()
    }
    within = {name: np.minimum(x, table.ranges[name][1]) for name, x in raised.items()}
    values = np.concatenate([[], *(term.values for term in table.terms)])
    logs = table.constant + _logs(table.work, raised)
    return np.exp(logs + (_design(table, within) @ values if len(values) else 0.0))


def _logs(product: Product, sizes: Columns) -> Float[np.ndarray, " rows"]:
    return sum(power * np.log(column(name, sizes)) for name, power in product)  # type: ignore


def _design(table: ShapeTable, sizes: Columns) -> Float[np.ndarray, "rows knots"]:
    """What each value of each term counts in the logarithm of each latency."""
    parts = []
    for term in table.terms:
        logs, last = _logs(term.product, sizes), len(term.values) - 1
        at = np.clip((logs - term.low) / (term.high - term.low), 0, 1) * last
        # A hat around each knot.
        parts.append(np.maximum(0, 1 - np.abs(at[:, None] - np.arange(last + 1))))
    return np.concatenate(parts, -1) if parts else np.zeros((len(next(iter(sizes.values()))), 0))


def _solve(
    table: ShapeTable,
    sizes: Columns,
    target: Float[np.ndarray, " rows"],
    weights: Float[np.ndarray, " rows"],
) -> tuple[float, Float[np.ndarray, " values"]]:
    """The constant and the values of all terms, by repeated weighting of least squares."""
    from scipy.linalg import block_diag

    design = np.concatenate([np.ones((len(target), 1)), _design(table, sizes)], -1)
    blocks = (_penalty(len(term.values)) for term in table.terms)
    penalty = np.asarray(block_diag(0.0, *blocks))
    counted, solution, residual = weights, np.zeros(design.shape[1]), target
    for _ in range(_ROUNDS):
        weighted = design * counted[:, None]
        solution = np.linalg.solve(weighted.T @ design + penalty, weighted.T @ target)
        residual = target - design @ solution
        # The spread of the bulk of those that count whole, from the median.
        spread = 1.4826 * np.median(np.abs(residual[weights == weights.max()])) + 1e-12
        counted = weights / np.maximum(1, np.abs(residual) / (_OUTLYING * spread))
    return float(solution[0] + np.average(residual, weights=weights)), solution[1:]


def _penalty(size: int) -> Float[np.ndarray, "size size"]:
    """The penalty on the values of a term."""
    bend = np.diff(np.eye(size), 2, axis=0)
    return _CURVATURE * bend.T @ bend + _SIZE * np.eye(size)
