from ._decided import (
    Composed as Composed,
    Decided as Decided,
    decided_steps as decided_steps,
)
from ._decision import (
    AbstractDecision as AbstractDecision,
    AbstractOneDecides as AbstractOneDecides,
    AbstractWeighed as AbstractWeighed,
    OneEach as OneEach,
    Resampled as Resampled,
    SlowestOf as SlowestOf,
    VectorRule as VectorRule,
    decide as decide,
)
from ._pool import (
    GROUPS as GROUPS,
    Pool as Pool,
    Ranks as Ranks,
    group_of as group_of,
    make_pool as make_pool,
    pool_weights as pool_weights,
)
from ._reservoir import EXTREMES as EXTREMES, RESERVOIR as RESERVOIR, Reservoir as Reservoir
from ._selection import (
    Chances as Chances,
    Selection as Selection,
    chances_of as chances_of,
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
