"""What fields of a program hold: `Map`, `Vector`, `Matrix` and `DenseMatrix`, and how they behave in every kind of run.

Reading never changes anything and never fails: what is absent reads as 0, or as None where there are no numbers.
"""

from __future__ import annotations

from millpond.programs.elements.dense import DenseMatrix
from millpond.programs.elements.element import Element
from millpond.programs.elements.map import Map
from millpond.programs.elements.matrix import Matrix
from millpond.programs.elements.own import StateElement
from millpond.programs.elements.vector import Vector

__all__ = ["DenseMatrix", "Element", "Map", "Matrix", "StateElement", "Vector"]
