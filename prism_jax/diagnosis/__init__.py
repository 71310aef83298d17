# Is a measured step time normal, and what explains it? `_series` reduces step times to four
# figures, `_causes` says how each cause would change a step, `_evidence` what traces of ranks say
# of it, `_diagnose` weighs all of this, and `_changes` tries what could be set otherwise.
from ._changes import quickest_change as quickest_change
from ._diagnose import (
    Diagnosis as Diagnosis,
    diagnose as diagnose,
    diagnose_ranks as diagnose_ranks,
    hypotheses as hypotheses,
)
