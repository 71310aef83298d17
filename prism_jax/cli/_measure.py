import os
from typing import Any

from .._files import shown
from .._misc import counted, quoted
from .._summary import Column, Table, plain
from . import _load
from ._options import PROGRESS, Given, Output, argument, command, flag
from ._values import check_out_folder, number


_SECONDS, _QUICK = 600.0, 60.0


@command(
    "--quick --out my_machine",
    argument(
        "--job JOB",
        "a job, whose layers on one device have the measured shapes (a grid of widths, in bf16)",
    ),
    flag("--quick", "measure for a minute, not for ten"),
    argument("--seconds S", "for how long to measure (600)", number(0, "seconds, 0 to 1e9")),
    argument("--out FOLDER", "the folder to write", required=True),
    flag("--force", "overwrite files that are there"),
    PROGRESS,
    csv=True,
)
def run(given: Given) -> Output:
    """Measure the kernels of this machine through JAX, and write it as a cluster for jobs."""
    import jax

    from ..data import load_job
    from ..measure import FILES, calls_for, rates_of, save_machine, split_scatter, time_calls

    check_out_folder(given.out)
    check_out_folder(os.path.join(given.out, "network"))
    path = os.path.join(given.out, "cluster.toml")
    there = [name for name in FILES if os.path.lexists(os.path.join(given.out, name))]
    if there and not given.force:
        raise ValueError(
            f"--out `{shown(given.out)}` has a `{there[0]}` already; give another folder, or "
            "`--force` to overwrite it."
        )
    seconds = (_QUICK if given.quick else _SECONDS) if given.seconds is None else given.seconds
    calls = calls_for(load_job(given.job) if given.job else None, jax.local_devices(), seconds)
    _load.say(given, f"measuring {len(calls[0])} calls on each device")
    timed = time_calls(calls, seconds, progress=_load.wants_progress(given))
    if timed.interrupted:
        _load.tell_ended(f"{counted(timed.seconds.shape[2], 'round')}; the machine is of these")
    scatter = split_scatter(timed.seconds, timed.kinds)
    words = f"{f'--job {quoted(given.job)} ' if given.job else ''}--seconds {seconds:g}"
    save_machine(given.out, timed, scatter, f"prism-jax measure {words}")
    devices, _, rounds = timed.seconds.shape
    result = {
        "machine": given.out,
        "devices": devices,
        "rounds": rounds,
        "dispatch_s": timed.dispatch_s,
        "left_out": timed.left_out,
        "kernels": plain(rates_of(timed)),
        **plain(scatter),
    }
    use = f"{shown(path)}: written; for a job: `--set cluster={shown(path)} --set num_nodes=1`"
    return Output(result, [_table(result), use])


def _table(result: dict[str, Any]) -> Table:
    residual, rank = result["residual"], result["rank"]
    columns = (
        "kernel",
        "dtype",
        Column("size", "size", ".4g"),
        Column("mean", "seconds", ".4g", "ms", scale=1e3),
        Column("per second", lambda row: row["size"] / row["seconds"], ".4g"),
        Column("residual", lambda row: residual[row["kernel"].removesuffix("_backward")], ".3f"),
    )
    rounds, devices = counted(result["rounds"], "round"), counted(result["devices"], "device")
    notes = [
        "residual: the standard deviation of the logarithm of one call; that of what a round has "
        f"in common is {result['step']:.3f}, with an autocorrelation of "
        f"{result['autocorrelation']:.2f}" + ("" if rank is None else f", of devices {rank:.3f}"),
        f"dispatch: {1e6 * result['dispatch_s']:.3g} us, subtracted; shorter calls that are left "
        f"out: {result['left_out']}",
    ]
    title = f"{rounds} on {devices}; sizes in FLOPs, or in bytes without a dtype:"
    return Table(columns, result["kernels"], title, notes, most=None)
