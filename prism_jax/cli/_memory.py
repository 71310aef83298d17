from .._summary import plain
from ._options import NO_PROFILE, SET, Given, Output, command


@command("gpt3-175b-h100-4096 --set training.recompute=full", NO_PROFILE, *SET, csv=True)
def run(given: Given) -> Output:
    """Print the peak memory of each pipeline rank, by part."""
    from ..data import load_job
    from ..prediction import memory

    job = load_job(given.job, given.overrides)
    found = memory(job)
    table = found.summary().named(job.name, most=None)
    assert job.cluster is not None
    fits = "fits" if found.fits else "does not fit"
    text = (
        f"{job.name} {fits} {job.cluster.device.name}, which has {found.device_bytes / 1e9:.1f} GB."
    )
    return Output({**plain(found), "fits": found.fits}, [table, text])
