"""A job with a model and a machine as the graph of its ops and their kernels."""

from .._misc import check_type
from ..data import Job, check_parts
from ..schedule import AbstractSchedule, ForwardOnly, OpGraph, op_graph, order_of
from ..workload import Costs, Workload, block_means
from ._chains import lower_chains


def parts_of(job: Job, purpose: str = "predict its step") -> Costs:
    """The parts of a job that has a model and a machine.

    **Raises:**

    `ValueError` if the job has none, which it needs for the `purpose`.
    """
    check_type(job, Job, "job", "use `load_job` to get one")
    if job.model is None or job.cluster is None or job.training is None or job.kernels is None:
        raise ValueError(
            f"Job `{job.name}` has a layout and a schedule only; add `model`, `cluster` and "
            f"`training` to {purpose}."
        )
    return Costs(job.model, job.layout, job.schedule, job.training, job.cluster, job.kernels)


def lay_out(
    job: Costs, order: AbstractSchedule | None = None
) -> tuple[AbstractSchedule, OpGraph, Workload]:
    """The schedule of a step, which knows the costs of its ops, their graph, and their kernels.

    **Arguments:**

    - `job`: the parts of a job.
    - `order`: a schedule to use instead of that of the job.

    **Raises:**

    `ValueError` if the layout does not fit the model or the cluster, or if the schedule deadlocks.
    """
    check_parts(job.model, job.layout, job.schedule, job.training, job.cluster)
    if order is None:
        order = order_of(job.schedule, job.layout, job.training)
    elif job.training.forward_only:
        order = ForwardOnly(order)
    workload = lower_chains(job, order)
    order = _with_costs(order, workload)
    return order, graph_of(job, order), workload


def graph_of(job: Costs, order: AbstractSchedule) -> OpGraph:
    """The graph of an order, in which send_recvs block if the job or else the schedule says so."""
    blocking = job.schedule.blocking
    return op_graph(order, blocking=order.blocking if blocking is None else blocking)


def _with_costs(schedule: AbstractSchedule, workload: Workload) -> AbstractSchedule:
    """The schedule, optimised for the mean latencies of the blocks and of the slowest send_recv."""
    names = ("forward", "backward_input", "backward_weight")
    means = {name: block_means(getattr(workload, name)) for name in names}
    send_recv = max((kernel.mean for kernel in workload.send_recv.values()), default=0.0)
    return schedule.with_costs(**means, send_recv=send_recv)
