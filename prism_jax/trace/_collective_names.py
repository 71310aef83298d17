"""The collectives behind the names that libraries use."""

import re


# In the order of a search: longer names first. NCCL's kernels, PyTorch's calls and gloo's.
_NAMES = {
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "send": "send",
    "recv": "recv",
}
_KERNEL = re.compile(r"(?:void )?(?:nccl|rccl)(?:Dev)?Kernel\w*?_(\w+)", re.IGNORECASE)
# All members leave these at the same time.
TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


def collective_of(name: str) -> str:
    """`all_reduce` for `allreduce_coalesced`, and so on; the name itself for what is unknown."""
    plain = name.lower().replace("_", "")
    return next((known for text, known in _NAMES.items() if text in plain), name)


def collective_of_kernel(kernel: str) -> str | None:
    """The collective that an NCCL or RCCL kernel runs."""
    found = _KERNEL.match(kernel)
    return collective_of(found[1]) if found else None
