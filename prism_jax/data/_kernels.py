"""Profiles of kernels: how near to the hardware's limits they run, and how much they vary."""

import math
from typing import Annotated, Literal

import msgspec

from ._types import Fraction, Label, Name, NonNegative, Positive, Text


COMPONENTS = ("rank", "step", "worker_step", "microbatch", "residual", "stall", "network")
SHARED = ("rank", "step", "worker_step", "microbatch", "network")


class Efficiency(msgspec.Struct, frozen=True):
    """What part of a peak rate a kernel reaches, by its size.

    **Attributes:**

    - `kernel`: its kind.
    - `variant`: the dtype of compute, the link of a collective; empty for any.
    - `sizes`: increasing; FLOPs of `gemm` and `attention`, bytes of everything else.
    - `values`: the efficiency at each size.
    - `latency_s`: overhead of each call, in seconds.
    """

    kernel: str
    variant: str
    sizes: tuple[float, ...]
    values: tuple[float, ...]
    latency_s: float = 0.0

    def at(self, size: float) -> float:
        """The efficiency at `size`, interpolated in its logarithm, constant beyond the ends."""
        sizes, values = self.sizes, self.values
        if size <= sizes[0]:
            return values[0]
        for i in range(1, len(sizes)):
            if size <= sizes[i]:
                weight = math.log(size / sizes[i - 1]) / math.log(sizes[i] / sizes[i - 1])
                return (1 - weight) * values[i - 1] + weight * values[i]
        return values[-1]


class Variation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One cause of variation of one kind of kernel, or of all of them.

    **Attributes:**

    - `kernel`: the kind; empty for the components that kernels share.
    - `component`: `residual` (each call of the kernel by itself), `stall`, or one that is shared:
        `rank`, `step`, `worker_step`, `microbatch`, `network`.
    - `family`: the law of the factor, or for a stall of its duration; `two-regimes` of `network`.
    - `parameters`: of the law; a stall has `rate` (stalls per call) and `median_s` as well, the
        network `probability` and `slowdown`.
    - `source`: where the numbers are from.
    """

    kernel: Label
    component: Name
    family: Name
    parameters: dict[Name, float]
    source: str = ""


class Overlap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How well communication hides behind compute on a cluster.

    **Attributes:**

    - `contention`: the share of the units that compute which a collective beside them takes, so
        that a hidden collective costs this part of its own latency; below one.
    - `data_parallel`: what part of the gathering of parameters that could be hidden is.
    """

    contention: Annotated[float, msgspec.Meta(ge=0, lt=1)]
    data_parallel: Fraction


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number that was chosen, and why."""

    name: Text
    value: Text
    reason: Text


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the numbers of a folder of `kernels/` are from.

    **Attributes:**

    - `who`, `when`, `software`, `licence`: of the measurements.
    - `sample_counts`: how many samples each figure rests on.
    - `constants`: what was chosen rather than measured, and why.
    - `overlap`: how well communication hides behind compute; of clusters only.
    - `name`: of the folder.
    - `stands_in_for`: the machine that has no folder of its own and takes these numbers; empty
        where they are the machine's.
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


# The wider dtype whose efficiency, a part of the peak, stands in for that of a narrower one.
STANDS_IN = {"fp4": "mxfp8", "mxfp8": "fp8"}


class Kernels(msgspec.Struct, frozen=True):
    """What is known of the kernels of a device and the collectives of a cluster.

    **Attributes:**

    - `efficiency`: of compute and of collectives.
    - `variability`: around the mean latencies.
    - `overlap`: how well communication hides behind compute.
    - `sources`: where all of it is from.
    - `compute`, `network`: factors on the mean latency of every compute kernel, and of whatever
        collectives do between nodes.
    - `growth`: compute takes `(dp / num_replicas) ** growth` times as long with `dp` replicas.
    - `constant_s`: what a step takes besides its kernels, whatever its size, in seconds.
    - `floor_s`: no compute kernel is shorter, in seconds.
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
    floor_s: float = 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each machine that takes the numbers of another."""
        return tuple(
            f"the {source.stands_in_for} has no table of kernels of its own, so that of "
            f"`{source.name}` stands in (its key `kernels` chooses which), and true step times may "
            "differ."
            for source in self.sources
            if source.stands_in_for
        )

    def find_efficiency(self, kernel: str, variant: str) -> Efficiency | None:
        """The table of `kernel` for `variant`, or for what stands in for it, or for any."""
        found = {e.variant: e for e in self.efficiency if e.kernel == kernel}
        while variant not in found and variant in STANDS_IN:
            variant = STANDS_IN[variant]
        return found.get(variant, found.get(""))

    def find_variation(self, component: str, kernel: str = "") -> Variation | None:
        """The law of `component` for `kernel`; `None` where there is none."""
        for variation in self.variability:
            if variation.component == component and variation.kernel == kernel:
                return variation
        return None


class EfficiencyRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of a device's `efficiency.csv`."""

    kernel: Name
    size: Positive
    efficiency: Positive
    dtype: Label = ""
    latency_s: NonNegative = 0.0


class CollectiveRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of a cluster's `efficiency.csv`."""

    kernel: Name
    bytes: Positive
    efficiency: Positive
    link: Label = ""


class VariationRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of `variability.csv`."""

    component: Literal["rank", "step", "worker_step", "microbatch", "residual", "stall", "network"]
    family: Name
    source: Text
    kernel: Label = ""
    parameters: str = ""
