"""Fine-tuning with a fine-tooth comb: name any part of a Keras model, train exactly that part, keep it as a patch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import batch as batch
    from .batch.selective_backprop import SelectiveBackprop as SelectiveBackprop
    from .batch.selective_backprop import selective_backprop as selective_backprop
    from .errors import BatchError as BatchError
    from .errors import FinetoothError as FinetoothError
    from .errors import GateError as GateError
    from .errors import PartError as PartError
    from .errors import PatchError as PatchError
    from .errors import SelectionError as SelectionError
    from .errors import TuningError as TuningError
    from .gates.gate import Gate as Gate
    from .gates.gate import gate as gate
    from .optimizers.lazy import LazyOptimizer as LazyOptimizer
    from .optimizers.selective import SelectiveOptimizer as SelectiveOptimizer
    from .parts.gradients import Pass as Pass
    from .parts.gradients import gradients as gradients
    from .parts.part import Part as Part
    from .patches.models import diff as diff
    from .patches.patch import Change as Change
    from .patches.patch import Patch as Patch
    from .regions.region import Grid as Grid
    from .regions.region import Points as Points
    from .regions.region import Region as Region
    from .regions.region import Whole as Whole
    from .schedule import Schedule as Schedule
    from .selection.heads import heads as heads
    from .selection.select import select as select
    from .selection.selection import Selection as Selection
    from .tuning.tuning import Tuning as Tuning
    from .tuning.tuning import tune as tune
    from .tuning.verify import Verification as Verification

__version__ = "0.1.0"

# A name is imported when it is first used, and Keras with it: importing finetooth never picks the backend, and the
# command line answers at once.
_HOME = {
    "batch": "",
    "SelectiveBackprop": "batch.selective_backprop",
    "selective_backprop": "batch.selective_backprop",
    "BatchError": "errors",
    "FinetoothError": "errors",
    "GateError": "errors",
    "PartError": "errors",
    "PatchError": "errors",
    "SelectionError": "errors",
    "TuningError": "errors",
    "Pass": "parts.gradients",
    "gradients": "parts.gradients",
    "Gate": "gates.gate",
    "gate": "gates.gate",
    "LazyOptimizer": "optimizers.lazy",
    "SelectiveOptimizer": "optimizers.selective",
    "Part": "parts.part",
    "Change": "patches.patch",
    "Patch": "patches.patch",
    "diff": "patches.models",
    "Grid": "regions.region",
    "Points": "regions.region",
    "Region": "regions.region",
    "Whole": "regions.region",
    "Schedule": "schedule",
    "heads": "selection.heads",
    "select": "selection.select",
    "Selection": "selection.selection",
    "Tuning": "tuning.tuning",
    "tune": "tuning.tuning",
    "Verification": "tuning.verify",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOME[name]
    return getattr(import_module(f".{home}", __name__), name) if home else import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
