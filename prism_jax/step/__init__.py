from ._decision import (
    AbstractDecision as AbstractDecision,
    AbstractOneDecides as AbstractOneDecides,
    AbstractWeighed as AbstractWeighed,
    OneEach as OneEach,
    Resampled as Resampled,
    SlowestOf as SlowestOf,
    VectorRule as VectorRule,
)
from ._exact import ExactRule as ExactRule, decide as decide
from ._reservoir import EXTREMES as EXTREMES, RESERVOIR as RESERVOIR, Reservoir as Reservoir
from ._selection import (
    Chances as Chances,
    Selection as Selection,
    chances_of as chances_of,
    effective_samples as effective_samples,
    sample_weights as sample_weights,
)
from ._step import (
    ConditionalExceedance as ConditionalExceedance,
    LastTables as LastTables,
    StepParts as StepParts,
    last_spreads as last_spreads,
    last_tables as last_tables,
    step_parts as step_parts,
    times_or_chances as times_or_chances,
)
from ._systematic import BLOCK as BLOCK, SILVER as SILVER, STEP_TILES as STEP_TILES
