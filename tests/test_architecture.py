"""Imports follow docs/reference/architecture.md: the order of its table, no cycles, and folders that stay light."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "fastcar_compile"
ENTRIES = re.findall(
    r"^\| `([a-z_]+)(?:/|\.py)` \|", (ROOT / "docs" / "reference" / "architecture.md").read_text("utf-8"), re.MULTILINE
)
HEAVY = ("torch", "transformers", "onnx")
TORCH_SIDE = (
    *(f"{PACKAGE}.{m}" for m in ("gates.tensors", "artifact.programs", "runtime.generation", "runtime.backends.eager")),
    "fastcar_play.onnx_library",
)
"""The modules of light folders that are torch's side of a gate, of an artifact, of a backend and of the web page."""
LIGHT = (
    *("errors", "support", "gates", "config", "artifact", "runtime"),
    *("codegen.hls.control_table", "codegen.hls.step_program", "ir.types", "ir.tensor_files", "ir.exact"),
)
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / PACKAGE).rglob("*.py"))
}
TREES = {module: ast.parse(path.read_text("utf-8")) for module, path in MODULES.items()}
PLAY = {f"fastcar_play.{path.stem}": path for path in sorted((ROOT / "play" / "fastcar_play").glob("*.py"))}
"""The modules of the plug-in, which runs on a device too."""


def targets(node: ast.AST) -> Iterator[str]:
    """Return the modules of the package that an import statement names."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "the package has no relative imports"
        names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    yield from (name for name in names if name in MODULES and name != PACKAGE)


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Return the nodes that run when the module is imported: no function bodies and no `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not function and not checking:
            yield node
            yield from at_import(node)


def entry(module: str) -> str:
    """Return the entry of the table that a module belongs to."""
    return module.split(".")[1]


def test_a_class_name_means_one_thing() -> None:
    trees = [*TREES.values(), *(ast.parse(path.read_text("utf-8")) for path in PLAY.values())]
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert not [name for name, count in names.items() if count > 1]


def test_the_table_lists_every_file_and_folder() -> None:
    found = {entry(module) for module in MODULES if "." in module} - {"__main__"}
    assert sorted(ENTRIES) == sorted(found)


def test_no_import_is_against_the_order() -> None:
    order = {name: number for number, name in enumerate(ENTRIES)} | {"__main__": len(ENTRIES)}
    against = set[str]()
    for module, tree in TREES.items():
        if module == PACKAGE:
            continue  # the public names, from everywhere
        imports = (ast.Import, ast.ImportFrom)
        for node in (n for n in ast.walk(tree) if isinstance(n, imports)):
            wrong = [target for target in targets(node) if order[entry(target)] > order[entry(module)]]
            against |= {f"{module}:{node.lineno} imports {target}" for target in wrong}
    assert not against, "\n".join(sorted(against))


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of one cycle, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = {
        module: {t for node in at_import(tree) for t in targets(node)} - {module} for module, tree in TREES.items()
    }
    for module, found in graph.items():
        # `from a.b import c` runs a/b/__init__.py as well, unless this file is inside of a.b
        parents = {t.rpartition(".")[0] for t in found} - {PACKAGE, ""}
        found |= {p for p in parents if not module.startswith(f"{p}.") and p != module}
    assert cycle(graph) == []
    assert cycle({"a": {"b"}, "b": {"a"}}) != [], "the check itself finds one"


def test_light_folders_import_nothing_heavy() -> None:
    found = {n: [m for m in MODULES if f"{m}.".startswith(f"{PACKAGE}.{n}.") and m not in TORCH_SIDE] for n in LIGHT}
    assert [name for name, modules in found.items() if not modules] == []
    play = [m for m in PLAY if m not in TORCH_SIDE]
    modules = [module for names in found.values() for module in names] + play
    code = f"import sys\nfor name in {modules!r}:\n    __import__(name)\n"
    code += f"    if found := {set(HEAVY)!r} & set(sys.modules):\n        sys.exit(f'{{name}} imports {{found}}')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def joined_paths(source: str) -> Iterator[ast.expr]:
    """Return what is joined with the folder of an artifact, `<something>.path / <name>`, or by a call."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.BinOp(left=ast.Attribute(attr="path"), op=ast.Div()):
                yield node.right
            case ast.Call(func=ast.Attribute(attr="joinpath", value=ast.Attribute(attr="path"))):
                yield node
            case ast.Call(func=ast.Name("Path") | ast.Attribute(attr="join"), args=[ast.Attribute(attr="path"), _, *_]):
                yield node
            case _:
                pass


def test_files_of_an_artifact_are_taken_from_its_opened_files() -> None:
    """`artifact.files` gives what was checked; a path may be another file by the time that it is opened."""
    free = {"MANIFEST", "SIGNATURE"}  # no section names them, and no backend reads them
    found = [
        f"{module}:{name.lineno}"
        for module, path in [*MODULES.items(), *PLAY.items()]
        for name in joined_paths(path.read_text("utf-8"))
        if not (isinstance(name, ast.Name) and name.id in free)
    ]
    assert not found, "\n".join(found)
    hostile = ["a.path / name", "a.b.path / n", "a.path.joinpath(n)", "Path(a.path, n)", "os.path.join(a.path, n)"]
    assert [len(list(joined_paths(text))) for text in hostile] == [1] * 5
