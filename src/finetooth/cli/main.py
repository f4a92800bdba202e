"""The `finetooth` command. Keras is imported only once a command needs it: help and errors of usage come at once."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import __version__
from ..display.format import clean, size
from ..display.table import Table
from ..errors import FinetoothError

BACKENDS = ("tensorflow", "jax", "torch")
EXAMPLES = """examples:
  finetooth demo                                         new classes for a digits model, in half a minute
  finetooth inspect base.keras                           every weight of a saved model
  finetooth inspect base.keras 'head/*' '**/kernel[:, :64]'
                                                         what a selection holds; quote it, for the shell's sake
  finetooth --backend jax inspect base.keras             the same, with Keras on JAX
"""
SELECTION_HELP = """selection text:
  PATH-GLOB[INDEX], the index is optional
  *        anything inside one path segment      head/*
  **       any number of segments                **/kernel
  [index]  NumPy-like                            emb/embeddings[50257:], out/kernel[:, [1,5,-1]], conv/kernel[..., :4]
  Several selections are united.
"""


class CommandError(FinetoothError):
    """Raised for a command that cannot do what was asked."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, or 2 where the request or the model file is at fault."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except FinetoothError as error:
        # Line breaks are part of an error (a caret under the column); any other control character is not.
        lines = "\n".join(clean(line) for line in str(error).split("\n"))
        print(f"finetooth: error: {lines}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="finetooth",
        description="Train exactly the part of a Keras model you choose, and keep the result as a small exact patch.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"finetooth {__version__}")
    backend_help = "what Keras runs on; default: KERAS_BACKEND, or Keras' own configuration"
    parser.add_argument("--backend", choices=BACKENDS, default=None, help=backend_help)
    # The option may also follow the command; absent there, it must not undo the one before.
    either_place = argparse.ArgumentParser(add_help=False)
    either_place.add_argument("--backend", choices=BACKENDS, default=argparse.SUPPRESS, help=backend_help)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands, either_place)
    _add_inspect(commands, either_place)
    return parser


def _add_demo(commands: Any, shared: argparse.ArgumentParser) -> None:
    text = "Teach a small digits model two new classes in three ways, and compare what each moved, kept and cost."
    demo = commands.add_parser("demo", parents=[shared], help="see it work, in half a minute", description=text)
    demo.add_argument("--seed", type=_seed, default=0, metavar="N", help="random seed, 0 or more (default: 0)")
    demo.set_defaults(run=_demo)


def _add_inspect(commands: Any, shared: argparse.ArgumentParser) -> None:
    inspect = commands.add_parser(
        "inspect",
        parents=[shared],
        help="list a saved model's weights, or what a selection holds",
        description="List the weights of a .keras file by the paths that selections use, or show what a selection "
        "of them holds. The file is loaded in safe mode: no code in it runs.",
        epilog=SELECTION_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inspect.add_argument("model", metavar="MODEL.keras", type=Path, help="a model saved with model.save(...)")
    inspect.add_argument(
        "selections", metavar="SELECTION", nargs="*", default=[], help="selection text, quoted; see below"
    )
    inspect.set_defaults(run=_inspect)


def _seed(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else -1
    if not 0 <= number < 2**32:
        raise argparse.ArgumentTypeError(f"expected an integer from 0 to {2**32 - 1}, received {text!r}")
    return number


def _start_keras(backend: str | None, *others: str) -> None:
    """Import Keras on the wanted backend, and others where installed, without the notes they write as they start."""
    running = sys.modules.get("keras")
    if backend and running and running.backend.backend() != backend:
        raise CommandError(f"Keras runs on {running.backend.backend()} in this process already; received {backend!r}.")
    if backend:
        os.environ["KERAS_BACKEND"] = backend
    level = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        with _stderr_kept_back(level == "3"):
            for name in ("keras", *(name for name in others if find_spec(name))):
                import_module(name)
    except ImportError as error:
        raise CommandError(
            f"Keras cannot start: {error}. Install a backend, for example "
            f'`pip install "finetooth[{backend or "tensorflow"}]"`, or choose another with --backend.'
        ) from None


@contextmanager
def _stderr_kept_back(wanted: bool) -> Iterator[None]:
    """Hold back all output to stderr, from C++ too, and show it only when the block fails.

    TensorFlow writes a few notes to the file descriptor whatever its log level.
    """
    if not wanted:
        yield
        return
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as notes:
        os.dup2(notes.fileno(), 2)
        try:
            yield
        except BaseException:
            notes.seek(0)
            os.write(stderr, notes.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)


def _demo(arguments: argparse.Namespace) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # images of 8x8 only make torch's threads wait for each other
    try:
        import_module("sklearn")
    except ModuleNotFoundError:
        raise CommandError(
            'The demo needs scikit-learn, for its digits. Install it with `pip install "finetooth[demo]"`.'
        ) from None
    _start_keras(arguments.backend, "tensorflow")  # Keras' `fit` loads TensorFlow on every backend
    from . import demo

    demo.run(arguments.seed, Console(highlight=False))


def _inspect(arguments: argparse.Namespace) -> None:
    _check_file(arguments.model)
    _start_keras(arguments.backend)
    from .. import select

    model = _load(arguments.model)
    table = select(model, *arguments.selections).table() if arguments.selections else _weights_table(model)
    console = Console(highlight=False)
    # As wide as the terminal; piped, as wide as the table needs.
    console.print(table) if console.is_terminal else print(table)


def _check_file(path: Path) -> None:
    """Refuse all but `.keras` files. Keras would load HDF5 without safe mode, and other things by name alone."""
    if path.suffix.lower() in (".h5", ".hdf5"):
        raise CommandError(
            f"{str(path)!r} is an HDF5 file, and Keras loads those without safe mode: code inside could run. If you "
            "trust it, load it in Python, write it with `model.save('NAME.keras')`, and inspect that."
        )
    if path.suffix != ".keras":
        raise CommandError(f"Expected a model saved as NAME.keras; received {str(path)!r}.")
    if not path.is_file():
        raise CommandError(f"There is no file {str(path)!r}.")


def _load(path: Path) -> Any:
    """Load the model in a `.keras` file; no code in the file runs."""
    from keras.saving import load_model

    try:
        return load_model(path, compile=False, safe_mode=True)
    except Exception as error:  # A file that someone else wrote can fail in any way.
        reason = str(error).strip().split("\n\n")[0] or type(error).__name__
        raise CommandError(f"{str(path)!r} cannot be loaded: {reason}") from None


def _weights_table(model: Any) -> Table:
    """Make the table of every weight of the model, with totals."""
    from ..keras_internals.weights import selectable, to_numpy, weights_by_path

    trainable = selectable(model)
    values = {path: to_numpy(variable) for path, variable in weights_by_path(model).items()}
    rows = [
        (path, str(value.shape), str(value.dtype), f"{value.size:,}", _kind(value, trainable.get(path)))
        for path, value in values.items()
    ]
    elements, total_bytes = sum(v.size for v in values.values()), sum(v.nbytes for v in values.values())
    selectable_elements = sum(values[path].size for path in trainable)
    return Table(
        title=f"Weights of {model.name!r}",
        columns=("variable", "shape", "dtype", "elements", "kind"),
        rows=rows,
        right=("elements",),
        caption=(
            f"{len(rows):,} variables, {elements:,} elements, {size(total_bytes)}",
            f"a selection can hold {selectable_elements:,} of them: those of kind trainable or frozen",
        ),
    )


def _kind(value: Any, trained: Any) -> str:
    """Name the kind of a variable: trained by gradients, frozen, or not trainable at all."""
    if trained is not None:
        return "trainable" if trained.trainable else "frozen"
    return "integer" if value.dtype.kind in "iub" else "statistic"
