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
                inner = PACKAGE / "/".join([*module.split("."), f"{alias.name}.py"])
                yield prefix + (f"{module}.{alias.name}".strip(".") if node.level and inner.exists() else module)


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
    if file.name != "keras_private.py" and file.parent.name != "backends":
        private = re.findall(r"\b(?:layer|model|variable|optimizer)\._(?!_)\w+", source)
        assert not private, private


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
