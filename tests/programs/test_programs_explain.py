"""What a program became is told in words, and drawn."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from both_ways import define
from test_programs_shapes import RECOMMENDER

import millpond as mp
from millpond.errors import BadOption

WORDS = """program P: 2 fields, 2 methods, 2 lanes

state
  user_item: partitioned matrix, by long, values double, round 1
  co_occ: partial matrix, 2 lanes, values double, round 2

add_rating(user long, item long, rating double): writes
  TE 1, line 8: writes user_item[user]
       takes user long, item long, rating double
       then TE 2, by the lane of user
  TE 2, line 13: writes co_occ, lane of user
       takes user long, item long, others array<long>

get_rec(user long, k long = 10) -> array<long>: read-only
  TE 1, line 18: reads user_item[user]
       takes user long, k long
       then TE 2, one-to-all
  TE 2, line 19: reads co_occ, all lanes
       takes k long, row vector
       then TE 3, all-to-one
  TE 3, line 23: computes no state
       takes parts collection<vector>, k long, row vector

rounds
  1: user_item
  2: co_occ

serial: an epoch equals its calls one after the other
  because no call accesses a field twice, and all access fields in the same order"""


def test_in_words() -> None:
    assert mp.explain(define(RECOMMENDER)) == WORDS


def test_cycles_are_told() -> None:
    cls = define("""
        @mp.program
        class P:
            a: mp.Partitioned[mp.Vector]
            b: mp.Partitioned[mp.Vector]

            def go(self, ks: "array<long>"):
                for k in ks:
                    self.a[k] += 1
                    self.b[k] += 1
    """)
    words = mp.explain(cls)
    assert "round-synchronous: calls of an epoch take turns, round by round" in words
    assert "go, line 9, accesses a after b, and the other way round happens, too" in words
    assert "then TE 2, partitioned by k, a cycle" in words


def test_as_a_picture() -> None:
    explained = mp.explain(define(RECOMMENDER))
    picture = explained.svg()
    assert explained._repr_svg_() == picture, "what notebooks ask for"
    tree = ET.fromstring(picture)
    boxes = [e for e in tree.iter() if e.tag.endswith("rect")]
    assert len(boxes) == 2 + 2 + 3
    edges = [e for e in tree.iter() if e.get("class") == "edge"]
    assert len(edges) == 1 + 2
    assert "all-to-one" in picture


def test_the_picture_in_the_docs_is_that_of_their_first_class() -> None:
    docs = Path(__file__).parents[2] / "docs"
    first = (docs / "programs.md").read_text().split("```python\n")[1].split("```")[0]
    picture = mp.explain(define(first + "\n\nP = Recommender\n")).svg()
    assert (docs / "plots" / "recommender.svg").read_text() == picture + "\n", f"keep it as {picture}"


def test_only_programs_are_explained() -> None:
    for ask in (mp.explain, mp.plain):
        with pytest.raises(BadOption, match="is no program"):
            ask(int)
