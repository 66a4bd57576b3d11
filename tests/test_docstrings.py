"""Every example in a docstring of the package runs, and every public function has one."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import focus_jax

# Scripts of child processes, which import what only those need.
SCRIPTS = {"focus_jax.sampling.llama_cpp_child", "focus_jax.tasks.grading_worker"}
MODULES = sorted({m.name for m in pkgutil.walk_packages(focus_jax.__path__, "focus_jax.")} - SCRIPTS)


def examples_of(module):
    """The docstrings of a module that hold examples, by the name of what they describe."""
    found = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(module), module)
    return {test.name: test for test in found if test.examples}


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_every_docstring_run(module):
    report = []
    for test in examples_of(module).values():
        doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert not report, "".join(report)


@pytest.mark.parametrize("name", focus_jax.__all__)
def test_what_the_package_offers_is_described_and_functions_by_example(name):
    thing = getattr(focus_jax, name)
    assert inspect.getdoc(thing)
    if not isinstance(thing, type):
        assert f"{thing.__module__}.{name}" in examples_of(thing.__module__)


def test_an_example_that_is_wrong_is_found():
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    assert doctest.DocTestRunner(verbose=False).run(wrong, out=lambda text: None).failed == 1
