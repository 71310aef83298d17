"""How accurate predictions were: lines copied from `docs/accuracy.md`."""

from collections.abc import Sequence

from .._summary import Table
from ._html import Markup, join, table, tag
from ._report import Report


# Means of published steps from configuration alone: table, rows, mean error, mean absolute, worst.
MEANS = (
    ("Korthikanti et al. 2022, A100", "8", "-0.7 %", "1.9 %", "-5.2 %"),
    ("MLPerf families", "11", "-2.0 %", "2.6 %", "-8.7 %"),
    ("Megatron-Bridge, B200, dense", "3", "+4.5 %", "4.5 %", "+7.8 %"),
    ("Megatron-Bridge, B200, experts", "10", "-10.6 %", "20.5 %", "+48.5 %"),
    ("Megatron-Bridge, B300, experts", "11", "-1.5 %", "21.4 %", "-42.0 %"),
    ("Megatron-Bridge, GB200, dense", "20", "-0.5 %", "4.2 %", "-15.3 %"),
    ("Megatron-Bridge, GB200, experts", "17", "+6.0 %", "23.6 %", "+55.9 %"),
    ("Megatron-Bridge, GB300, dense", "13", "+4.1 %", "5.8 %", "+31.6 %"),
    ("Megatron-Bridge, GB300, experts", "24", "+11.7 %", "20.3 %", "+61.5 %"),
    ("Megatron-Bridge, H100, dense", "7", "+1.5 %", "3.5 %", "-6.2 %"),
    ("Megatron-Bridge, H100, experts", "16", "-21.0 %", "22.6 %", "-62.1 %"),
    (
        "Megatron-Core r0.8, H100, assumed: micro-batch 1, not interleaved",
        "5",
        "+11.4 %",
        "13.8 %",
        "+19.1 %",
    ),
    (
        "Megatron-LM 2021, A100, assumed: micro-batch 1, fewest virtual stages",
        "3",
        "-3.0 %",
        "3.3 %",
        "-8.8 %",
    ),
    ("Megatron-LM Llama examples, H100", "2", "+3.8 %", "3.8 %", "+4.7 %"),
    ("SimuMax, B200, context parallel", "6", "+1.3 %", "2.0 %", "+3.7 %"),
    ("SimuMax, B200, experts", "7", "-3.3 %", "3.3 %", "-5.9 %"),
    ("SimuMax, B200, others", "9", "-2.1 %", "2.6 %", "-9.9 %"),
    ("llm-foundry, FSDP, a100_40gb", "39", "-9.2 %", "9.2 %", "-32.5 %"),
    ("llm-foundry, FSDP, a100_80gb", "31", "-5.4 %", "7.4 %", "-26.4 %"),
    ("llm-foundry, FSDP, h100_80gb", "39", "-7.8 %", "9.4 %", "-21.2 %"),
    ("torchtitan, FSDP", "9", "-26.3 %", "26.3 %", "-44.9 %"),
    ("vTrain, Megatron-DeepSpeed, A100, multi node", "55", "-4.0 %", "8.3 %", "-39.2 %"),
    ("vTrain, Megatron-DeepSpeed, A100, single node", "720", "-23.0 %", "26.8 %", "-78.1 %"),
)
# Jobs calibrated to the step times of one system, or of several, that predict another system.
CALIBRATED = (
    "from one scale: p50 off by 0.30 % on average; p95/p50 by 0.0021, carried over by 0.0025; 90 % "
    "intervals hold 64 % of steps, with --epistemic 96 %",
    "from several: p50 off by 0.16 % on average; the line by 0.12 %; p95/p50 by 0.0030, carried "
    "over by 0.0042; 90 % intervals hold 73 % of steps, with --epistemic 89 %",
)
# Profiles of traces, fitted to some steps and scored on others: trace, split, mean, p95, std ratio.
TRACES = (
    ("slow_worker", "even to odd", "+0.05 % (0.14)", "+0.52 % (0.09)", "1.16 (0.52)"),
    ("slow_worker", "odd to even", "-0.29 % (0.14)", "-0.06 % (0.16)", "1.22 (0.28)"),
    ("stage_imbalance", "even to odd", "-0.32 % (0.55)", "-1.45 % (2.59)", "1.14 (1.88)"),
    ("stage_imbalance", "odd to even", "-0.02 % (0.59)", "-1.58 % (2.70)", "1.16 (0.90)"),
)


def expected_error(report: Report) -> Markup:
    """How far predictions of this kind were off, and for which runs."""
    parts = [
        tag(
            "p",
            "The intervals on this page cover only the noise of the simulation: more samples make "
            "them narrower, but not the model more accurate. The commands that docs/accuracy.md "
            "names print how accurate predictions of this kind were.",
        ),
        *(_of_trace() if report.job is None else _of_job(report)),
    ]
    return join(parts)


def _of_trace() -> Sequence[Markup]:
    about = (
        "This is a profile of a trace. Two traced jobs (StragglerAnalysis, arXiv:2505.05713; 64 "
        "GPUs with one slow worker, and 8 GPUs with a longer last stage) were fitted to every "
        "other step and scored on the steps in between: predicted over measured, minus one. The "
        "brackets hold the scatter of each figure, as only 11 or 16 steps were measured. The table "
        "does not apply to the steps of another run, or of other GPUs."
    )
    header = ("trace", "from and to", "mean", "p95", "std ratio")
    return tag("p", about), table(Table(header, TRACES, "Steps of a trace from other steps"))


def _of_job(report: Report) -> Sequence[Markup]:
    job = report.job
    if job is not None and job.calibrated is not None:
        about = (
            "This job is calibrated to measured step times. Of families of MLPerf Training logs "
            "(GPT-3 175B and Llama 3.1 405B on H100 and GB200, 512 to 6,144 GPUs), jobs that were "
            "calibrated to some systems predicted another of the same family:"
        )
        return tag("p", about), tag("ul", *(tag("li", line) for line in CALIBRATED))
    about = (
        "This job is predicted from its configuration and from tables of kernels, without "
        "calibration. The table has the errors of such predictions for means of published steps: "
        "predicted over measured, minus one. The tables of kernels were chosen with knowledge of "
        "some of these runs, so a job unlike them may be further off, as small layers on one node "
        "(vTrain) are. The spread of jobs without calibration has not been compared: of calibrated "
        "jobs, nominal 90 % intervals contain 64 % of measured steps, and 96 % with --epistemic."
    )
    header = ("published runs", "rows", "mean error", "mean absolute error", "worst")
    title = "Means of published steps, from configuration alone"
    return tag("p", about), table(Table(header, MEANS, title))
