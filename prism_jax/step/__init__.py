from ._pool import (
    GROUPS as GROUPS,
    Chances as Chances,
    Pool as Pool,
    Ranks as Ranks,
    Room as Room,
    chances_of as chances_of,
    make_pool as make_pool,
    pool_weights as pool_weights,
    sample_group as sample_group,
)
from ._step import (
    STEP_TILES as STEP_TILES,
    Composed as Composed,
    ConditionalExceedance as ConditionalExceedance,
    Decided as Decided,
    StepParts as StepParts,
    decided_steps as decided_steps,
    last_spreads as last_spreads,
    step_parts as step_parts,
    times_or_chances as times_or_chances,
)
