"""Fine-tuning with a fine-tooth comb: name any part of a Keras model, train exactly that part, keep it as a patch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import batch as batch
    from .attention import heads as heads
    from .backprop import SelectiveBackprop as SelectiveBackprop
    from .backprop import selective_backprop as selective_backprop
    from .errors import BatchError as BatchError
    from .errors import FinetoothError as FinetoothError
    from .errors import GateError as GateError
    from .errors import PartError as PartError
    from .errors import PatchError as PatchError
    from .errors import SelectionError as SelectionError
    from .errors import TuningError as TuningError
    from .forward import Pass as Pass
    from .forward import gradients as gradients
    from .gates import Gate as Gate
    from .gates import gate as gate
    from .lazy import LazyOptimizer as LazyOptimizer
    from .optimizer import SelectiveOptimizer as SelectiveOptimizer
    from .part import Part as Part
    from .patch import Change as Change
    from .patch import Patch as Patch
    from .patch import diff as diff
    from .region import Grid as Grid
    from .region import Points as Points
    from .region import Region as Region
    from .region import Whole as Whole
    from .schedule import Schedule as Schedule
    from .selecting import select as select
    from .selection import Selection as Selection
    from .tuning import Tuning as Tuning
    from .tuning import tune as tune
    from .verification import Verification as Verification

__version__ = "0.1.0"

# A name is imported when it is first used, and Keras with it: importing finetooth never picks the backend, and the
# command line answers at once.
_HOME = {
    "batch": "",
    "heads": "attention",
    "SelectiveBackprop": "backprop",
    "selective_backprop": "backprop",
    "BatchError": "errors",
    "FinetoothError": "errors",
    "GateError": "errors",
    "PartError": "errors",
    "PatchError": "errors",
    "SelectionError": "errors",
    "TuningError": "errors",
    "Pass": "forward",
    "gradients": "forward",
    "Gate": "gates",
    "gate": "gates",
    "LazyOptimizer": "lazy",
    "SelectiveOptimizer": "optimizer",
    "Part": "part",
    "Change": "patch",
    "Patch": "patch",
    "diff": "patch",
    "Grid": "region",
    "Points": "region",
    "Region": "region",
    "Whole": "region",
    "Schedule": "schedule",
    "select": "selecting",
    "Selection": "selection",
    "Tuning": "tuning",
    "tune": "tuning",
    "Verification": "verification",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOME[name]
    return getattr(import_module(f".{home}", __name__), name) if home else import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
