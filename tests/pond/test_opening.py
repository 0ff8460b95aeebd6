"""What opening a pond with a Spark session looks at."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace

import pytest

from millpond.pond.opening import _warn_of_another_python


def test_workers_of_another_python_are_told_of_before_they_fail() -> None:
    with pytest.warns(UserWarning, match=f"PYSPARK_PYTHON={sys.executable}"):
        _warn_of_another_python(SimpleNamespace(master="local[2]", pythonExec="/nowhere/python"))


@pytest.mark.parametrize(("master", "python"), [("local[*]", sys.executable), ("yarn", "/nowhere/python")])
def test_this_python_and_that_of_a_cluster_are_not(master: str, python: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _warn_of_another_python(SimpleNamespace(master=master, pythonExec=python))
