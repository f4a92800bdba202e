"""Rules that keep some examples of a batch, and scores of examples that rules decide by.

Rules are pure functions from one score per example to the indices of the examples to keep. As a rule scores are losses:
the higher, the harder. The number to keep is known beforehand, so that compiled functions see one shape. Of equal
scores the earlier example is kept. Scores that are not finite are never kept: where fewer than `k` are finite, those
are repeated.
"""

from .example_scores import Excess as Excess
from .example_scores import Stale as Stale
from .example_scores import entropy as entropy
from .example_scores import margin as margin
from .rules import balanced as balanced
from .rules import chances as chances
from .rules import easiest as easiest
from .rules import hardest as hardest
from .rules import middle as middle
from .rules import percentile as percentile
from .rules import random as random
from .rules import remembered as remembered
from .rules import sample as sample
