"""Profiles of kernels: their efficiencies relative to the hardware's limits, and how much they
vary.
"""

import functools as ft
import math
from typing import Annotated

import msgspec

from ._shapes import Shapes, ShapeTable, shape_key
from ._types import Fraction, Text
from ._variations import Variation


class Efficiency(msgspec.Struct, frozen=True, cache_hash=True):
    """The efficiency of a kernel: the share of a peak rate that it reaches, by its size.

    **Attributes:**

    - `kernel`: the kind of kernel.
    - `variant`: the dtype of compute, or the link of a collective; empty for any.
    - `sizes`: increasing sizes, in FLOPs for `gemm`, `convolution` and `attention`, and in bytes
        for all other kernels.
    - `values`: the efficiency at each size.
    - `latency_s`: the overhead of each call, in seconds.
    """

    kernel: str
    variant: str
    sizes: tuple[float, ...]
    values: tuple[float, ...]
    latency_s: float = 0.0

    def at(self, size: float) -> float:
        """The efficiency at `size`: interpolated over the size's logarithm, constant beyond the
        ends.
        """
        sizes, values = self.sizes, self.values
        if size <= sizes[0]:
            return values[0]
        for i in range(1, len(sizes)):
            if size <= sizes[i]:
                weight = math.log(size / sizes[i - 1]) / math.log(sizes[i] / sizes[i - 1])
                return (1 - weight) * values[i - 1] + weight * values[i]
        return values[-1]


class Overlap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How well communication overlaps with compute on a cluster.

    **Attributes:**

    - `contention`: the share of the compute units that an overlapped collective takes. An
        overlapped collective therefore costs this share of its own latency. Below one.
    - `data_parallel`: the share of parameter gathering that is overlapped, of all that could be.
    """

    contention: Annotated[float, msgspec.Meta(ge=0, lt=1)]
    data_parallel: Fraction


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number that was chosen rather than measured, and why."""

    name: Text
    value: Text
    reason: Text


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the numbers of a folder of `kernels/` are from.

    **Attributes:**

    - `who`, `when`, `software`, `licence`: who made the measurements, when, with which software,
        and under which licence they are.
    - `sample_counts`: how many samples each figure is from.
    - `constants`: the numbers that were chosen rather than measured, and why.
    - `overlap`: how well communication overlaps with compute; for clusters only.
    - `name`: the name of the folder.
    - `stands_in_for`: the machine without a folder of its own for which these numbers are used;
        empty if they are the machine's own.
    """

    who: Text
    when: Text
    software: Text
    licence: Text
    sample_counts: dict[str, int]
    constants: tuple[Constant, ...] = ()
    overlap: Overlap | None = None
    name: str = ""
    stands_in_for: str = ""


# A job has some hundred kernels of few kinds.
@ft.lru_cache(maxsize=128)
def _of_kernel(tables: tuple[Efficiency, ...], kernel: str) -> dict[str, Efficiency]:
    """The tables of a kernel by variant."""
    return {one.variant: one for one in tables if one.kernel == kernel}


# For a dtype without a table: the wider dtype whose efficiency is used in its place.
STANDS_IN = {"fp4": "mxfp8", "mxfp8": "fp8"}


class Kernels(msgspec.Struct, frozen=True):
    """The profile of the compute kernels of a device and the collectives of a cluster.

    **Attributes:**

    - `efficiency`: the efficiencies of compute kernels and collectives.
    - `variability`: the laws around the mean latencies.
    - `overlap`: how well communication overlaps with compute.
    - `sources`: where the numbers are from.
    - `compute`: a factor on the mean latency of every compute kernel.
    - `network`: a factor on the latency of all parts of collectives between nodes.
    - `growth`, `num_replicas`: with `dp` replicas, compute takes `(dp / num_replicas) ** growth`
        times as long.
    - `constant_s`: the time that a step of any size takes besides its kernels, in seconds.
    - `constant_share`: the largest part that `constant_s` may be of what the fullest pipeline rank
        runs in a step, with its exposed collectives; `None` for no limit.
    - `floor_s`: the shortest time of a compute kernel, in seconds.
    - `shapes`: the latencies of the device's kernels by shape; empty if they were not
        measured.
    """

    efficiency: tuple[Efficiency, ...]
    variability: tuple[Variation, ...]
    overlap: Overlap
    sources: tuple[Source, ...] = ()
    compute: float = 1.0
    network: float = 1.0
    growth: float = 0.0
    num_replicas: int = 1
    constant_s: float = 0.0
    constant_share: float | None = None
    floor_s: float = 0.0
    shapes: Shapes = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each machine for which the numbers of another are used."""
        return tuple(
            f"the {source.stands_in_for} has no table of kernels of its own, so the table of "
            f"`{source.name}` is used (its key `kernels` chooses the table), and true step times "
            "may differ."
            for source in self.sources
            if source.stands_in_for
        )

    def find_efficiency(self, kernel: str, variant: str) -> Efficiency | None:
        """The efficiencies of `kernel` for `variant`, for its substitute, or for any variant."""
        known = _of_kernel(self.efficiency, kernel)
        while variant not in known and variant in STANDS_IN:
            variant = STANDS_IN[variant]
        return known.get(variant, known.get(""))

    def find_shapes(self, kernel: str, dtype: str) -> tuple[ShapeTable, ...]:
        """The tables by shape of `kernel` for a dtype, for its substitute, or for any dtype, in the
        order of their cases; none if there are none.
        """
        dtype = "bf16" if dtype == "fp16" else dtype
        while shape_key(kernel, dtype) not in self.shapes and dtype in STANDS_IN:
            dtype = STANDS_IN[dtype]
        found = self.shapes.get(shape_key(kernel, dtype), ())
        return found or self.shapes.get(shape_key(kernel, ""), ())

    def find_variation(self, component: str, kernel: str = "") -> Variation | None:
        """The law of `component` for `kernel`; `None` if there is none."""
        for variation in self.variability:
            if variation.component == component and variation.kernel == kernel:
                return variation
        return None
