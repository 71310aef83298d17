"""The mean latencies of a program's kernels."""

from collections.abc import Callable

import equinox as eqx
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from .._padding import AnyArray


class LatencyTable(eqx.Module):
    """The mean latency of each kernel. The law around it has mean one and depends on the kind only.

    Means and spreads are separate parameters: a derivative with respect to one keeps the other
    fixed.

    **Attributes:**

    - `mean`: the mean latencies, in seconds.
    - `kinds`, `kind`, `sizes`: kernel `k` is `kinds[kind[k]]` at `sizes[k]`. Static.
    - `on_network`: whether the network's regime applies to a kernel.
    - `loading`: for a kernel that is an op by itself, how strongly the factor `f` of its
        microbatch's data acts on it: it takes `1 + loading (f - 1)` times as long, but never a
        negative time. On the compute of other ops, and on all compute if `loading` is `None`, the
        factor acts in full.
    """

    mean: Float[Array, " kernels"]
    kinds: tuple[str, ...] = eqx.field(static=True, default=())
    kind: tuple[int, ...] = eqx.field(static=True, default=())
    sizes: tuple[str, ...] = eqx.field(static=True, default=())
    on_network: Bool[AnyArray, " kernels"] | None = None
    loading: Float[Array, " kernels"] | None = eqx.field(metadata={"fill": 1}, default=None)


def check_means(mean: np.ndarray, name: Callable[[int], str], dtype: DTypeLike) -> None:
    """Raises a `ValueError` of one sentence if a mean latency cannot be computed with in `dtype`.

    **Arguments:**

    - `mean`: the mean latencies, in seconds.
    - `name`: what has each of them.
    """
    info, longest = np.finfo(dtype), mean.max(initial=0)
    # Derivatives hold squares of the longest; what shorter ones lose does not matter beside it.
    most = float(info.max) ** 0.47
    problems = (
        (
            ~(np.isfinite(mean) & (mean >= 0)),
            "negative or not finite; give one that is finite and not negative",
        ),
        (
            (mean > 0) & (mean < info.tiny),
            f"less than the least number that {info.dtype} holds, {info.tiny:.2g} s; give 0 or a "
            "longer one, or set `jax_enable_x64`",
        ),
        (
            (mean == longest) & (mean > 0) & ~((mean >= 1 / most) & (mean <= most)),
            f"and the longest must be between {1 / most:.0e} and {most:.0e} s in {info.dtype}; "
            "give all latencies in another unit, or set `jax_enable_x64`",
        ),
    )
    for where, problem in problems:
        if where.any():
            first = int(np.argmax(where))
            raise ValueError(f"{name(first)} has a mean latency of {mean[first]:.6g} s, {problem}.")


def check_scale(name: str, mean: float, dtype: DTypeLike) -> None:
    """Raises a `ValueError` of one sentence if `dtype` does not hold cubes of a law's mean."""
    most = float(np.finfo(dtype).max) ** 0.32
    if not 1 / most <= mean <= most:
        raise ValueError(
            f"The law of {name} has a mean of {mean:.6g}, and {np.finfo(dtype).dtype} holds cubes "
            f"of {1 / most:.0e} to {most:.0e} only; give means as numbers, and the law, with a "
            "mean of about one, as the residual of a kind in `variability`."
        )
