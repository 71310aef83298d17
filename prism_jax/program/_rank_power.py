"""The law of a GPU's factor on compute where a power limit makes GPUs differ."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from ..cluster import clock_factors
from ..data import Device
from ..latency import Empirical
from ..workload import Block, split_mean


# Kernels that the clock bounds. All others only move bytes, and do not feel it.
_BOUND = ("gemm", "convolution", "attention")
# `Empirical` has its nodes at equally spaced normal scores from -6 to 6.
_SCORES = np.linspace(-6.0, 6.0, 129)


def rank_of_power(device: Device, blocks: Sequence[Block]) -> Empirical:
    """The factor of a GPU on its compute, from what GPUs of a device leak.

    The factors of products and of attention, weighted with their shares of the job's compute. A GPU
    has one factor for all of it, so that ops with larger shares get too little.

    **Arguments:**

    - `device`: the job's device.
    - `blocks`: the block of each op.

    **Raises:**

    `ValueError` if it is not known what the device draws.
    """
    if device.power is None:
        raise ValueError(
            f"the law of the rank: what the device `{device.name}` draws is not known; give "
            "another family than `power`, or add `[power]` to the device's file."
        )
    compute: defaultdict[str, float] = defaultdict(float)
    known = {id(block): block for block in blocks}  # Most ops have the same block.
    for key, number in Counter(map(id, blocks)).items():
        for kind, seconds in split_mean(known[key])[0].items():
            compute[kind] += number * seconds
    total = sum(compute.values()) or 1.0
    table = np.ones_like(_SCORES)
    for kind in _BOUND:
        table += compute[kind] / total * (clock_factors(device.power, kind, _SCORES) - 1)
    return Empirical(table)
