"""The `finetooth` command. Keras is imported only once a command needs it: help and errors of usage come at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import __version__
from ..display.format import clean
from ..errors import FinetoothError
from .start import BACKENDS, CommandError, check_file, start_keras

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


def _demo(arguments: argparse.Namespace) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # images of 8x8 only make torch's threads wait for each other
    try:
        import_module("sklearn")
    except ModuleNotFoundError:
        raise CommandError(
            'The demo needs scikit-learn, for its digits. Install it with `pip install "finetooth[demo]"`.'
        ) from None
    start_keras(arguments.backend, "tensorflow")  # Keras' `fit` loads TensorFlow on every backend
    from . import demo

    demo.run(arguments.seed, Console(highlight=False))


def _inspect(arguments: argparse.Namespace) -> None:
    check_file(arguments.model)
    start_keras(arguments.backend)
    from . import inspect

    inspect.run(arguments.model, arguments.selections, Console(highlight=False))
