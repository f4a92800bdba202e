"""The shape of the code: rooms import one way, nothing private is used, nothing runs foreign code."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import finetooth

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "finetooth"
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__") for file in FILES}
BACKENDS = {"tensorflow", "jax", "torch"}
OF_TORCH = {"_indices", "_parameters", "_values", "_version"}  # which PyTorch has no public names for
ORDER = re.search(r"```order\n(.*?)```", (ROOT / "docs" / "internals" / "architecture.md").read_text(), re.S)

# Rooms and files that import neither Keras nor a backend, so that tools without a framework can use them.
FRAMEWORK_FREE = (
    "errors",
    "display",
    "regions",
    "selection.patterns",
    "selection.selection",
    "patches.patch",
    "tuning.table",
    "cli.main",
    "cli.start",
)
# The one import that waits for a call: `Patch.apply` needs Keras, a patch does not.
DEFERRED = {("patches.patch", "patches.models")}
BLOCKED = """
import importlib, sys
for name in ("keras", "tensorflow", "jax", "torch"):
    sys.modules[name] = None  # importing it raises
for name in sys.argv[1:]:
    importlib.import_module(f"finetooth.{name}")
"""


def name_of(file):
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def room_of(module):
    return module.split(".")[0]


def imports_of(file, at_runtime=False):
    """Absolute names of everything a file imports, finetooth's own relative to the package.

    At runtime without those that only type checkers see.
    """
    package = name_of(file).split(".") if file.name == "__init__.py" else name_of(file).split(".")[:-1]
    package = [] if name_of(file) == "__init__" else package
    tree = ast.parse(file.read_text())
    for node in tree.body:
        if at_runtime and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            prefix = "finetooth." if node.level else ""
            for alias in node.names:
                inner = ".".join([*base, *([node.module] if node.module else []), alias.name])
                yield prefix + (inner if node.level and inner in MODULES else module)


def foreign_private_names(tree):
    """Attributes with a leading underscore that the file uses and does not define."""
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                own.add(name)
            case ast.Subscript(value=ast.Attribute(attr="__dict__"), slice=ast.Constant(value=name), ctx=ast.Store()):
                own.add(name)
    private = [node for node in nodes if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr)]
    return {ast.unparse(node) for node in private if node.attr not in own}


def heights():
    """The height of every room, read from the documentation; rooms of one line are on one floor."""
    lines = ORDER.group(1).strip().splitlines()
    return {room: height for height, line in enumerate(reversed(lines)) for room in line.split()}


def test_rooms_import_one_way():
    height = heights()
    rooms = {room_of(name_of(file)) for file in FILES} - {"__init__", "__main__"}
    assert set(height) == rooms
    for file in FILES:
        room = room_of(name_of(file))
        if room in ("__init__", "__main__"):
            continue  # the first names everything, for type checkers, and imports nothing until asked
        for imported in imports_of(file):
            if imported.startswith("finetooth."):
                other = room_of(imported.removeprefix("finetooth.").strip("."))
                # The package itself only has names and its version.
                assert other in ("", room) or height[other] < height[room], f"{name_of(file)} imports {imported}"


def test_no_file_of_a_room_imports_in_a_circle():
    """Each file can be imported first, in a process of no other."""
    edges = {
        name_of(file): {n.removeprefix("finetooth.") for n in imports_of(file, at_runtime=True)} & MODULES
        for file in FILES
    }
    edges.pop("__init__")
    for file, deferred in DEFERRED:
        edges[file].remove(deferred)
    done: set[str] = set()
    while ready := {name for name, needed in edges.items() if name not in done and needed - {name, "__init__"} <= done}:
        done |= ready
    assert set(edges) - done == set()


def test_imports_of_modules_by_their_package_are_seen():
    """`from . import bits` is an import of `bits`, as `from .bits import read` is."""
    assert "finetooth.regions.bits" in set(imports_of(PACKAGE / "tuning" / "verify.py"))


@pytest.mark.numpy
def test_backends_have_the_same_files():
    folders = [PACKAGE / "backends" / name for name in BACKENDS]
    parts = {"tensors.py", "variables.py", "gradients.py", "control.py", "training.py"}
    assert all(parts <= {file.name for file in folder.iterdir()} for folder in folders)


@pytest.mark.numpy
def test_rooms_without_keras_import_without_it():
    names = [name for name in sorted(MODULES) if any(f"{name}.".startswith(f"{free}.") for free in FRAMEWORK_FREE)]
    assert len(names) > len(FRAMEWORK_FREE)
    done = subprocess.run([sys.executable, "-c", BLOCKED, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.numpy
@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_rules_for_every_file(file):
    source, name = file.read_text(), name_of(file)
    for imported in imports_of(file):
        root = imported.split(".")[0]
        assert not imported.startswith("keras.src")
        assert root not in {"pickle", "marshal", "dill", "shelve"}
        assert root not in BACKENDS or name.startswith(f"backends.{root}")
    tree = ast.parse(source)
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"eval", "exec", "compile", "__import__"}
    assert not any(isinstance(node, ast.Assert) for node in ast.walk(tree))
    assert name == "keras_internals.marks" or '"_finetooth_' not in source
    assert len(source.splitlines()) <= 360
    if name not in ("keras_internals.private", "keras_internals.scopes"):
        allowed = OF_TORCH if name.startswith("backends.torch") else set()
        assert {private for private in foreign_private_names(tree) if private.split(".")[-1] not in allowed} == set()


def test_public_names_are_few_documented_and_exported_by_name():
    public = finetooth.__all__
    assert len(public) <= 40
    assert all(getattr(finetooth, name).__doc__ for name in public)
    static = re.findall(r"import (\w+) as (\w+)", (PACKAGE / "__init__.py").read_text())
    assert sorted(name for name, _ in static) == sorted(name for _, name in static) == sorted(public)


def test_every_module_is_documented():
    for file in FILES:
        if file.name != "__init__.py" or file.read_text():
            assert ast.get_docstring(ast.parse(file.read_text())), file


def test_every_module_but_other_backends_imports(backend):
    others = BACKENDS - {backend}
    for file in FILES:
        if not others & set(name_of(file).split(".")) and file.stem != "__main__":
            assert importlib.import_module(f"finetooth.{name_of(file)}".removesuffix(".__init__"))
