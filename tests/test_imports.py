"""Which room may import which, and that the pure functions need nothing but jax and numpy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import focus_jax

ROOT = Path(focus_jax.__file__).parent

# Room: (rooms it may import beside itself, third-party packages it may import). "" is the pure functions.
ALLOWED = {
    "": (set(), {"jax", "numpy"}),
    "agents": (set(), {"numpy", "jinja2"}),
    "sampling": ({"agents", "models"}, {"numpy", "httpx", "xllamacpp", "tokenizers", "flax", "jax"}),
    "collection": ({"", "agents", "sampling"}, {"numpy", "jax", "rich"}),
    "tasks": ({"agents", "sampling", "collection"}, {"numpy", "jax", "math_verify", "latex2sympy2_extended"}),
    "models": ({""}, {"numpy", "jax", "flax", "safetensors"}),
    "training": ({"", "models", "collection"}, {"numpy", "jax", "flax", "optax", "orbax"}),
    "report": ({"", "collection"}, {"numpy", "rich", "matplotlib"}),
}


def imports_of(source, package):
    """Absolute names of all modules a file imports, those inside functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *filter(None, [node.module])])
            # `from focus_jax import agents` names a room only after the word import.
            yield from (f"{module}.{alias.name}" for alias in node.names) if module == "focus_jax" else [module]


def room_of(module):
    part = module.split(".")[1] if "." in module else ""
    return part if (ROOT / part).is_dir() else ""


def forbidden_imports(room, source, package="focus_jax"):
    rooms, third_party = ALLOWED[room]
    for name in imports_of(source, package):
        top = name.split(".")[0]
        ours, theirs = room_of(name) in rooms | {room}, top in third_party | sys.stdlib_module_names
        if not (ours if top == "focus_jax" else theirs):
            yield name


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_imports_only_what_its_room_may(path):
    parts = path.relative_to(ROOT).parts
    package = ".".join(["focus_jax", *parts[:-1]])
    assert not list(forbidden_imports(parts[0] if len(parts) > 1 else "", path.read_text(), package))


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("", "import flax"),
        ("", "from focus_jax.agents import State"),
        ("", "def f():\n    from . import collection"),
        ("agents", "from focus_jax import backup"),
        ("agents", "from focus_jax.sampling.scripted import ScriptedSampler"),
        ("sampling", "from focus_jax import collection"),
        ("collection", "import focus_jax.tasks.math"),
        ("collection", "import flax.nnx"),
    ],
)
def test_a_forbidden_import_is_found(room, source):
    assert list(forbidden_imports(room, source))


BLOCK = """
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

class OnlyJaxAndNumpy(PathFinder):
    allowed = {"focus_jax", "jax", "numpy"} | {"jaxlib", "ml_dtypes", "opt_einsum", "scipy"}  # the latter are jax's own

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in cls.allowed | sys.stdlib_module_names or top.startswith("_sysconfigdata"):
            return super().find_spec(name, path, target)

sys.meta_path[:] = [BuiltinImporter, FrozenImporter, OnlyJaxAndNumpy]
sys.path.insert(0, sys.argv[1])
import focus_jax
print(focus_jax.refine(0.8, 0.5, 2).round(3), *(name for name in sys.modules if name.startswith("focus_jax.")))
for name in ("rich", "flax"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} should have been blocked")
"""


def test_the_pure_functions_need_only_jax_and_numpy():
    run = subprocess.run([sys.executable, "-c", BLOCK, str(ROOT.parent)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    value, *modules = run.stdout.split()
    assert value == "0.6"
    assert {room_of(module) for module in modules} == {""}


def test_all_names_what_the_package_offers():
    assert len(set(focus_jax.__all__)) == len(focus_jax.__all__)
    public = {n for n, thing in vars(focus_jax).items() if not n.startswith("_") and not isinstance(thing, type(ast))}
    assert public == set(focus_jax.__all__)
