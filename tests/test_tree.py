"""The shape of the code: one-way imports, backends in one place, nothing private, nothing that runs foreign code."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import finetooth

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "finetooth"
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file in FILES}
OF_TORCH = {"_indices", "_parameters", "_values", "_version"}  # which PyTorch has no public names for
LAYERS = re.search(r"```order\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.S)


def name_of(file):
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imports_of(file):
    """Absolute names of everything a file imports, finetooth's own relative to the package."""
    package = name_of(file).split(".") if file.name == "__init__.py" else name_of(file).split(".")[:-1]
    package = [] if name_of(file) == "__init__" else package
    for node in ast.walk(ast.parse(file.read_text())):
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


def rank():
    order = {}
    for height, line in enumerate(reversed(LAYERS.group(1).strip().splitlines())):
        for module in line.split():
            order[module] = height
    return order


def test_the_order_of_imports_is_the_one_the_documentation_draws():
    order = rank()
    assert set(order) == {name_of(file) for file in FILES}
    for file in FILES:
        if file == PACKAGE / "__init__.py":
            continue  # it names everything, for type checkers, and imports nothing until asked
        for imported in imports_of(file):
            if imported.startswith("finetooth.") or imported == "finetooth":
                module = imported.removeprefix("finetooth").strip(".") or "__init__"
                assert order[module] < order[name_of(file)], f"{name_of(file)} imports {module}"


def test_imports_of_modules_by_their_package_are_seen():
    """`from . import bits` is an import of `bits`, as `from .bits import read` is."""
    assert {"finetooth.bits", "finetooth.region"} <= set(imports_of(PACKAGE / "verification.py"))
    assert {"finetooth.reading.linear", "finetooth.reading.points"} <= {
        name for file in ("rules", "linear") for name in imports_of(PACKAGE / "reading" / f"{file}.py")
    }


@pytest.mark.numpy
@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_rules_for_every_file(file):
    source = file.read_text()
    for imported in imports_of(file):
        root = imported.split(".")[0]
        assert not imported.startswith("keras.src")
        assert root not in {"pickle", "marshal", "dill", "shelve"}
        assert root not in {"tensorflow", "jax", "torch"} or file.parent.name == "backends"
    tree = ast.parse(source)
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"eval", "exec", "compile", "__import__"}
    assert not any(isinstance(node, ast.Assert) for node in ast.walk(tree))
    assert len(source.splitlines()) <= 360
    if name_of(file) != "backends.keras_private":
        allowed = OF_TORCH if name_of(file).startswith("backends.torch") else set()
        assert {name for name in foreign_private_names(tree) if name.split(".")[-1] not in allowed} == set()


def test_public_names_are_few_documented_and_exported_by_name():
    public = finetooth.__all__
    assert len(public) <= 40
    assert all(getattr(finetooth, name).__doc__ for name in public)
    static = re.findall(r"import (\w+) as (\w+)", (PACKAGE / "__init__.py").read_text())
    assert [name for name, _ in static] == [name for _, name in static] == public


def test_every_module_is_documented():
    for file in FILES:
        assert ast.get_docstring(ast.parse(file.read_text())), file


def test_every_module_but_other_backends_imports(backend):
    others = {"tensorflow", "jax", "torch"} - {backend}
    for file in FILES:
        if file.stem not in others and file.stem != "__main__":
            assert importlib.import_module(f"finetooth.{name_of(file)}".removesuffix(".__init__"))
