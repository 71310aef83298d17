"""Machines: devices, and clusters of them."""

from typing import Annotated

import msgspec

from ._types import (
    AtLeastOne,
    Count,
    Fraction,
    Kelvin,
    Label,
    Name,
    NonNegative,
    Positive,
    Text,
    Watts,
)


class Power(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an accelerator draws, and what lowers its clock. See `clock_factor`.

    **Attributes:**

    - `limit_w`: the power that it may draw.
    - `rated_w`: the limit at which the efficiencies of its kernels were measured; at this limit
        nothing changes.
    - `static_w`: what it draws at any clock: leakage, and what else does not compute.
    - `gemm_w`, `attention_w`: what it would draw in matrix products and in attention at the highest
        clock; above the limit, the clock falls.
    - `moving_w`: what it draws in kernels that only move bytes, which the clock does not slow.
    - `leakage_sigma`: how much `static_w` differs between devices of one temperature: the standard
        deviation of its logarithm.
    - `leakage_per_k`: how much the logarithm of `static_w` grows with each kelvin.
    - `temperature_k`: the standard deviation of the temperature between devices, in kelvins.
    - `warmer_k`: how much warmer than usual all of them are, as their inlets are; in kelvins.
    - `exponent`: the power of the clock that dynamic power grows with: voltage grows with the
        clock, and power with the clock times the square of the voltage.
    - `source`: where the numbers are from.
    """

    limit_w: Watts
    rated_w: Watts
    static_w: Watts
    gemm_w: Watts
    attention_w: Watts
    moving_w: Watts
    leakage_sigma: Fraction
    leakage_per_k: Fraction
    temperature_k: Annotated[float, msgspec.Meta(ge=0, le=100)]
    warmer_k: Kelvin = 0.0
    exponent: AtLeastOne = 3.0
    source: str = ""


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One accelerator.

    **Attributes:**

    - `memory_bytes`: the size of its main memory.
    - `memory_bandwidth_bytes_per_s`: the bandwidth of its main memory.
    - `peak_flop_per_s`: the peak rate for each dtype, without sparsity.
    - `name`: the name of the device.
    - `kernels`: the folder of `kernels/` with its efficiencies and variability, or the path of one,
        seen from the device's file; by default the folder with the name of the device.
    - `source`: where the numbers are from.
    - `power`: what it draws; `None` if that was not measured.
    """

    memory_bytes: Positive
    memory_bandwidth_bytes_per_s: Positive
    peak_flop_per_s: dict[Name, Positive]
    name: Label = ""
    kernels: Text | None = None
    source: str = ""
    power: Power | None = None


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A network level that joins groups of consecutive ranks.

    **Attributes:**

    - `name`: the name of the link.
    - `group`: how many consecutive ranks it joins.
    - `bandwidth_bytes_per_s`: the bandwidth per device and direction.
    - `latency_s`: the latency of one hop.
    """

    name: Name
    group: Count
    bandwidth_bytes_per_s: Positive
    latency_s: NonNegative = 1e-5


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes of equal devices, and the links between them.

    **Attributes:**

    - `device`: the accelerator.
    - `num_nodes`: the number of nodes.
    - `devices_per_node`: the number of devices in each node.
    - `links`: the links, innermost first; the last one joins all devices.
    - `name`: the name of its family.
    - `kernels`: the folder of `kernels/` with the efficiencies and variability of its collectives,
        or the path of one, seen from the cluster's file.
    - `source`: where the numbers are from.
    """

    device: Device
    num_nodes: Count
    devices_per_node: Count
    links: tuple[Link, ...]
    name: Label = ""
    kernels: Text | None = None
    source: str = ""

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node
