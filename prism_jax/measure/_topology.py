"""What `nvidia-smi topo -m` prints, as the links of a node."""

import itertools as it
import re

import numpy as np

from ..data import Link


# Bytes per second of one NVLink in one direction, by the name of the device. Source: NVIDIA's data
# sheets, for both directions: 300 GB/s by 6 (V100), 600 by 12 (A100), 900 by 18 (H100), 1,800 by 18
# (B200); 112.5 GB/s by 4 (a bridge of RTX cards).
_NVLINK = ((r"^g?b[1-3]00", 50e9), (r"^rtx", 14.0625e9), (r"", 25e9))
# PCI Express of 16 lanes in one direction: 5.0, 3.0 and 4.0. GeForce has no peer-to-peer: its bytes
# go to the host's memory and back.
_PCIE = (
    (r"^g?(?:h\d|b[1-3]00)", 64e9),
    (r"^(?:v100|p100|t4)", 16e9),
    (r"^rtx-\d", 16e9),
    (r"", 32e9),
)
# A hop of a ring. Source: NCCL src/graph/tuning.cc, protocol Simple, rounded.
_NVLINK_S, _PCIE_S = 3e-6, 6e-6
_MOST_NVLINKS = 18  # Of a GPU, to this day.
_MOST_GPUS = 576


def links_of_topology(text: str, device: str) -> tuple[Link, ...]:
    """The links of a node, the innermost first: NVLink among the GPUs that it joins, and PCI
    Express among all, if it does not join all.

    GPUs with more NVLinks to all others together than a GPU has are joined by switches, so that all
    links of a GPU lead to each of the others.

    **Arguments:**

    - `text`: what `nvidia-smi topo -m` printed.
    - `device`: the name of the device, whose generation gives the speed of a link.

    **Raises:**

    A `ValueError` of one sentence if there is no matrix of GPUs, or GPUs are joined unevenly.
    """
    rows = _matrix(text)
    number = len(rows)
    nvlinks = np.array([[int(cell[2:]) if cell[:2] == "NV" else 0 for cell in row] for row in rows])
    joined = (nvlinks > 0) | np.eye(number, dtype=bool)
    for _ in range(number.bit_length()):  # Each time, paths of twice the length.
        joined = joined @ joined
    sizes, of_gpu = set(joined.sum(axis=1).tolist()), nvlinks.sum(axis=1)
    of_gpu = np.where(of_gpu > _MOST_NVLINKS, nvlinks.max(axis=1), of_gpu)
    if len(sizes) > 1 or number % min(sizes):
        raise ValueError("its NVLinks join groups of GPUs of several sizes, and a link has one")
    (group,) = sizes
    links = []
    if group > 1:
        bandwidth = float(of_gpu.min()) * _speed(_NVLINK, device)
        links.append(Link("nvlink", group, bandwidth, _NVLINK_S))
    if group < number:
        links.append(Link("pcie", number, _speed(_PCIE, device), _PCIE_S))
    return tuple(links)


def _matrix(text: str) -> list[list[str]]:
    """How each GPU is joined to each."""
    cells = [re.sub(r"\x1b\[[\d;]*m", "", line).split() for line in text.splitlines()]
    header = next((row for row in cells if row[:1] == ["GPU0"] and "X" not in row), [])
    number = sum(re.fullmatch(r"GPU\d+", cell) is not None for cell in header)
    rows = [row[1 : 1 + number] for row in cells if row and re.fullmatch(r"GPU\d+", row[0])]
    rows = [row for row in rows if "X" in row][:number]
    kinds = re.compile(r"X|NV\d{1,2}|PIX|PXB|PHB|NODE|SYS")
    is_square = len(rows) == number and all(len(row) == number for row in rows)
    if not (1 < number <= _MOST_GPUS and is_square and all(map(kinds.fullmatch, it.chain(*rows)))):
        raise ValueError(
            f"it has no matrix of 2 to {_MOST_GPUS} GPUs as `nvidia-smi topo -m` prints it"
        )
    return rows


def _speed(speeds: tuple[tuple[str, float], ...], device: str) -> float:
    return next(speed for pattern, speed in speeds if re.search(pattern, device.lower()))
