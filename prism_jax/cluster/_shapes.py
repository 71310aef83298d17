"""Latencies of kernels by shape, from the tables that were fitted for the device."""

import math
from collections.abc import Mapping
from typing import Any

from ..data import Kernels, ShapeTable, column


# The hidden size at which DeepEP was measured between nodes.
_HIDDEN = 7168
# Names of the tables of attention.
FULL, CAUSAL, WINDOW = "full", "causal", "window"


def shape_latency(table: ShapeTable, sizes: Mapping[str, float]) -> float:
    r"""The latency of a kernel with a shape, in seconds.

    $\log t = c + \log w + \sum_j f_j(\log p_j)$, with the work $w$ and the products $p_j$ of the
    table. A size below the fitted range counts as the smallest that was fitted. One above it counts
    as the largest in all $p_j$, so that the latency grows with the work alone.

    **Arguments:**

    - `table`: the kernel's table.
    - `sizes`: the columns of the table.
    """
    logs, within = {}, {}
    for name, (low, high) in table.ranges.items():
        size = max(sizes[name], low)
        within[name] = min(size, high)
        logs[name] = math.log(size)
    total = table.constant
    for name, power in table.work:
        total += power * logs[name]
    for name, size in within.items():
        if size < sizes[name]:
            logs[name] = math.log(size)
    for term in table.terms:
        log = 0.0
        for name, power in term.product:
            if name not in logs:
                logs[name] = math.log(column(name, within))
            log += power * logs[name]
        values = term.values
        last = len(values) - 1
        at = (log - term.low) / (term.high - term.low) * last
        if at <= 0:
            total += values[0]
        elif at >= last:
            total += values[last]
        else:
            i = int(at)
            total += values[i] + (at - i) * (values[i + 1] - values[i])
    return math.exp(total)


def gemm_latency(kernels: Kernels, dtype: str, m: float, n: float, k: float) -> float | None:
    """The latency of a product of an `m` by `k` with a `k` by `n` matrix, in seconds; `None` if the
    device has no table. In fp8 and fp4, the activations' quantisation is in it.
    """
    return _latency(kernels, "gemm", dtype, {"m": m, "n": n, "k": k})


def attention_latency(
    kernels: Kernels,
    dtype: str,
    batch: float,
    sequence: float,
    heads: float,
    kv_heads: float,
    head_dim: float,
    causal: bool = True,
    window: float = 0,
) -> float | None:
    """The latency of the forward pass of attention on one GPU, in seconds; `None` if the device has
    no table.

    **Arguments:**

    - `batch`, `sequence`: how many sequences, and of how many tokens.
    - `heads`, `kv_heads`, `head_dim`: those of this GPU. The table is that of the nearest size of
        heads, of the same mask where there is one, and the latency in proportion.
    - `window`: how many tokens a token attends to at most; 0 for all.
    """
    mode = WINDOW if 0 < window < sequence and causal else CAUSAL if causal else FULL
    sizes = attention_sizes(mode, batch, sequence, heads, kv_heads, window)
    tables = kernels.find_shapes(f"attention_{mode}", dtype)
    if mode != CAUSAL:
        # A size of heads matters more than the mask, which the pairs account for.
        tables += kernels.find_shapes(f"attention_{CAUSAL}", dtype)
    if not tables:
        return None
    nearest = min(tables, key=lambda table: abs(math.log(table.case / head_dim)))
    return shape_latency(nearest, sizes) * head_dim / nearest.case


def attention_sizes(
    mode: str, batch: Any, sequence: Any, heads: Any, kv_heads: Any, window: Any
) -> dict[str, Any]:
    """The columns of a table of attention; of numbers, or of NumPy arrays."""
    # The smaller of the two, for numbers and for arrays.
    width = (window + sequence - abs(window - sequence)) / 2 if mode == WINDOW else sequence
    pairs = sequence * sequence if mode == FULL else sequence * width - width * width / 2
    return {
        "batch": batch,
        "sequence": sequence,
        "heads": heads,
        "kv_heads": kv_heads,
        "pairs": pairs,
    }


def mla_latency(
    kernels: Kernels, dtype: str, batch: float, sequence: float, heads: float
) -> float | None:
    """The latency of the forward pass of causal multi-head latent attention without projections, in
    seconds; `None` if the device has no table. Its `heads` heads of this GPU have a size of 192 for
    queries and keys, and 128 for values.
    """
    return _latency(kernels, "mla", dtype, {"batch": batch, "sequence": sequence, "heads": heads})


def experts_latency(
    kernels: Kernels,
    dtype: str,
    tokens: float,
    hidden: float,
    width: float,
    topk: float,
    experts: float,
    ep: float,
    gated: bool = True,
    exponent: float = 0.0,
) -> float | None:
    """The latency of the forward pass of the fused experts of one GPU, in seconds: routing,
    permutation, products, activation and the way back, without communication. `None` if the device
    has no table.

    **Arguments:**

    - `tokens`: the tokens of the whole expert-parallel group.
    - `hidden`, `width`: of the layer, and of an expert on this GPU.
    - `topk`, `experts`, `ep`: experts of a token, experts in all, and GPUs that share them.
    - `gated`: whether an expert has three matrices and not two.
    - `exponent`: of the power law of the experts' loads, of which the most loaded GPU counts; 0 if
        they are balanced. Between fitted exponents the latency's logarithm is linear; above them,
        the largest counts.
    """
    sizes = {
        "tokens": tokens,
        "hidden": hidden,
        "width": width,
        "topk": topk,
        "experts": experts,
        "ep": ep,
        "matrices": 3 if gated else 2,
    }
    tables = kernels.find_shapes("experts", dtype)
    lower = [table for table in tables if table.case <= exponent]
    upper = [table for table in tables if table.case > exponent]
    if not lower:
        return None
    latency = shape_latency(lower[-1], sizes)
    if not upper or lower[-1].case == exponent:
        return latency
    weight = (exponent - lower[-1].case) / (upper[0].case - lower[-1].case)
    return latency ** (1 - weight) * shape_latency(upper[0], sizes) ** weight


def node_collective_latency(
    kernels: Kernels, kind: str, num_bytes: float, gpus: float
) -> float | None:
    """The latency of a collective among GPUs of one node, in seconds; `None` if the device has no
    table.

    **Arguments:**

    - `kind`: `all_gather`, `all_reduce`, `reduce_scatter` or `all_to_all`.
    - `num_bytes`: the whole buffer: what is received of `all_gather`, and what is sent of
        `reduce_scatter` and `all_to_all`, the GPU's own part included.
    """
    return _latency(kernels, kind, "", {"bytes": num_bytes, "gpus": gpus})


def deepep_latency(
    kernels: Kernels,
    part: str,
    tokens: float,
    hidden: float,
    topk: float,
    experts: float,
    sms: float,
    nodes: float = 1,
) -> float | None:
    """The latency of DeepEP's `dispatch` (fp8 with scales) or `combine` (bf16) of balanced experts,
    without the wait of its notify kernels, in seconds; `None` if the device has no table.

    **Arguments:**

    - `tokens`: tokens of one GPU.
    - `hidden`, `topk`, `experts`: of the layer; experts in all.
    - `sms`: the multiprocessors that it takes.
    - `nodes`: how many nodes share the experts. Tables between nodes are of 8 of 256 experts and
        one hidden size; with another, a token counts in proportion.
    """
    if nodes > 1:
        tokens *= hidden / _HIDDEN
        sizes = {"nodes": nodes, "tokens": tokens, "sms": sms}
        return _latency(kernels, f"deepep_{part}_nodes", "", sizes)
    sizes = {"tokens": tokens, "hidden": hidden, "topk": topk, "experts": experts, "sms": sms}
    return _latency(kernels, f"deepep_{part}", "", sizes)


def nvlink_all_to_all_latency(
    kernels: Kernels, part: str, dtype: str, tokens: float, ep: float
) -> float | None:
    """The latency of a part of TensorRT-LLM's all-to-all of experts within an NVLink domain, in
    seconds, such as `dispatch_two_sided`; `None` if the device has no table. `tokens` are those of
    one GPU, of hidden size 7168 and for 8 of 256 experts.
    """
    return _latency(kernels, f"nvlink_{part}", dtype, {"tokens": tokens, "ep": ep})


def _latency(kernels: Kernels, kernel: str, dtype: str, sizes: Mapping[str, float]) -> float | None:
    tables = kernels.find_shapes(kernel, dtype)
    return shape_latency(tables[0], sizes) if tables else None
