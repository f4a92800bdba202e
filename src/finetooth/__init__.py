"""Fine-tuning with a fine-tooth comb: name any part of a Keras model, train exactly that part, keep it as a patch."""

from .errors import FinetoothError as FinetoothError
from .errors import PatchError as PatchError
from .errors import SelectionError as SelectionError
from .errors import TuningError as TuningError
from .patch import Change as Change
from .patch import Patch as Patch
from .patch import diff as diff
from .region import Grid as Grid
from .region import Points as Points
from .region import Region as Region
from .region import Whole as Whole
from .select import heads as heads
from .select import select as select
from .selection import Selection as Selection
from .tuning import Tuning as Tuning
from .tuning import tune as tune
from .verification import Verification as Verification

__version__ = "0.1.0"
