from ._chances import Chances as Chances, chances_of as chances_of
from ._decision import (
    SILVER as SILVER,
    STEP_TILES as STEP_TILES,
    AbstractDecision as AbstractDecision,
    AbstractOneDecides as AbstractOneDecides,
    OneEach as OneEach,
    SlowestOf as SlowestOf,
    VectorRule as VectorRule,
    decide as decide,
)
from ._errors import AbstractErrors as AbstractErrors
from ._reservoir import (
    EXTREMES as EXTREMES,
    RESERVOIR as RESERVOIR,
    Replicas as Replicas,
    Reservoir as Reservoir,
)
from ._selection import effective_samples as effective_samples
from ._step import (
    Over as Over,
    barriers as barriers,
    compose_steps as compose_steps,
    last_draws as last_draws,
    last_spreads as last_spreads,
    steps_of as steps_of,
)
