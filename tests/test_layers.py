"""The direction of imports (design, 6): a module imports only what stands before it, and hivemind stays at the edge."""

from __future__ import annotations

import ast
from pathlib import Path

import p2p_muloco

PACKAGE = Path(p2p_muloco.__file__).parent
LAYERS = [
    {"errors"},
    {"addresses"},
    {"config", "identity", "wire", "metrics", "home", "chaos", "skew", "verdict", "world"},
    {"muon", "outer", "codec"},
    {"merge", "model", "data"},
    {"packet"},
    {"chain"},
    {"waypoint"},
    {"bounds", "messages", "snapshot"},
    {"requests"},
    {"checkpoint", "held", "opinion", "partial", "reduce"},
    {"inner", "replay"},
    {"transfer"},
    {"allreduce", "gathering", "reports"},
    {"deadlines"},
    {"member"},
    {"exchange", "healing", "misbehave"},
    {"local", "trainer", "swarm"},
    {"door", "simulate"},
    {"hive"},
    {"peer"},
]
MAY_IMPORT_HIVEMIND = {"swarm"}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def modules() -> dict[str, Path]:
    return {path.stem: path for path in PACKAGE.glob("*.py") if path.stem != "__init__"}


def test_every_module_has_its_layer() -> None:
    assert {name for layer in LAYERS for name in layer} == set(modules())


def test_imports_go_one_way() -> None:
    order = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    for name, path in modules().items():
        for target in imported(path):
            parts = target.split(".")
            if parts[0] == "p2p_muloco" and len(parts) > 1 and parts[1] in order:
                assert order[parts[1]] < order[name], f"{name} imports {parts[1]}, which stands above it"
            assert not target.startswith("p2p_muloco.cli"), f"{name} imports the command line"


def test_hivemind_stays_at_the_edge() -> None:
    users = {name for name, path in modules().items() if any(t.split(".")[0] == "hivemind" for t in imported(path))}
    assert users == MAY_IMPORT_HIVEMIND


def test_no_print_and_no_pickle_in_the_library() -> None:
    for name, path in modules().items():
        tree = ast.parse(path.read_text())
        calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        assert "print" not in calls, name
        assert not {"pickle", "torch.load"} & imported(path), name
