"""The rules of one State in the form its slices use them; made once, shared by all of them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.code.rules import CompactRule, FetchRule, UpdateRule, keep_latest, put
from millpond.errors import BadRule, NullValue, RuleInterpreted
from millpond.kernels import control as at
from millpond.kernels import edges
from millpond.kernels.slot_hashing import SECRET
from millpond.schema import parse_ddl
from millpond.stores import views
from millpond.stores.cells import Layout
from millpond.stores.folds import Fold, stored_schema
from millpond.stores.key_index import KeyIndex
from millpond.stores.keys import Keys
from millpond.stores.userrules import UserRule, fold_rule, keep_rule, range_rule


class Ruleset:
    """Checks that the rules fit the values and each other: `BadRule` where they do not."""

    def __init__(
        self, values: pa.Schema, update: UpdateRule | None = None, compact: CompactRule | None = None
    ) -> None:
        self.values = values
        self.update = update or put()
        self.compact = compact or keep_latest()
        check_rules(values, self.update, self.compact)
        self.layout = Layout(stored_schema(values, self.update))
        self.span = self.compact.span
        self.fold = Fold(self.update, values, self.layout, self.span) if self.update.folds else None
        self.keep: UserRule | None = None
        if self.compact.code is not None:
            self.keep = keep_rule(self.compact.code, values, self.layout)
        self.compaction_failures = 0

    def copy(self) -> Ruleset:
        """The same rules, with counts of their own."""
        other = copy.copy(self)
        other.fold = copy.copy(self.fold)
        return other

    @property
    def failures(self) -> int:
        """How often a user's own rule failed here: on an update, which then changed nothing, or on compaction."""
        return self.compaction_failures + (self.fold.failures if self.fold is not None else 0)

    @property
    def may_fail(self) -> bool:
        """Whether an update may: by a user's own rule, or by sums that take far more room than what came.

        Each version of a sum of arrays is as long as the longest array before it.
        """
        return self.update.code is not None or (
            self.update.name == "add" and any(pa.types.is_list(field.type) for field in self.values)
        )

    @property
    def by_mask(self) -> bool:
        """Whether compaction looks at the versions themselves."""
        return self.compact.name in ("net_edges", "custom") or (
            self.compact.name == "ttl" and self.update.name == "edges"
        )


def check_rules(values: pa.Schema, update: UpdateRule, compact: CompactRule) -> None:
    if (update.name == "custom") != (update.code is not None) or (compact.name == "custom") != (
        compact.code is not None
    ):
        raise BadRule("a rule of one's own, and no other, comes with its code", rule=update.name)
    if (compact.name == "ttl") != (compact.span > 0) or (compact.span > 0) != (compact.span_kind != ""):
        raise BadRule("ttl, and no other rule, comes with a span", rule=compact.name)
    if update.folds and compact.code is not None:
        raise BadRule(
            "what is folded is compacted by keep_latest(), ttl() or not at all",
            hint="compaction of your own goes with mp.put() and mp.edges()",
            rule=compact.code.name,
        )
    if update.name == "edges":
        _check_edges(values, compact)
    elif compact.name == "net_edges":
        raise BadRule(
            "net_edges() compacts the neighbours that edges() keeps",
            hint="give update=mp.edges() too, or another compaction rule",
            rule="net_edges",
        )
    if update.name == "add":
        Fold(update, values, Layout(stored_schema(values, update)), 0)


def check_values(update: UpdateRule, schema: pa.Schema, values: Sequence[pa.Array]) -> None:
    """Rules that fold take no nulls, and `edges` none in the neighbour and in what became of it."""
    refused: Sequence[int] = range(len(schema)) if update.folds else ()
    if update.name == "edges":
        refused = (0, len(schema) - 1)
    for number in refused:
        column, name = values[number], schema.field(number).name
        nulls = column.null_count or (
            column.flatten().null_count if pa.types.is_list(column.type) and update.name == "add" else 0
        )
        if nulls:
            raise NullValue(
                f"the value column {name!r} is null in {nulls:,} places, and the update rule takes no null",
                hint="filter these rows out, or give them a value",
                column=name,
                rows=nulls,
            )


def _check_edges(values: pa.Schema, compact: CompactRule) -> None:
    first, last = values.field(0), values.field(len(values) - 1)
    neighbour = views.is_long(first.type) or views.is_bytes(first.type)
    if len(values) < 2 or not pa.types.is_boolean(last.type) or not neighbour:
        raise BadRule(
            f"edges() keeps neighbours and whether they were added; the value is ({', '.join(map(str, values))})",
            hint='for example value="neighbour long, added boolean"',
            rule="edges",
        )
    if compact.name == "keep_latest":
        raise BadRule(
            "keep_latest() would keep one neighbour of each vertex",
            hint="give compact=mp.net_edges(), mp.ttl(...) or mp.keep_all()",
            rule="keep_latest",
        )


def warn_if_interpreted(values: pa.Schema, rule: UpdateRule | CompactRule | FetchRule) -> None:
    """Compiles a user's own rule to see whether that works; a warning names the reason where it does not."""
    if rule.code is None:
        return
    if isinstance(rule, UpdateRule):
        found = fold_rule(rule.code, values, Layout(stored_schema(values, rule)))
    elif isinstance(rule, CompactRule):
        found = keep_rule(rule.code, values, Layout(values))
    else:
        found = range_rule(rule.code, values, Layout(values), returned(rule))
    if found.kernel is None:
        warnings.warn(
            f"the rule {rule.code.name!r} runs interpreted, row by row: {found.reason}",
            RuleInterpreted,
            stacklevel=3,
        )


def returned(rule: FetchRule) -> pa.DataType:
    """The type that a user's own fetch rule gives."""
    schema = parse_ddl(rule.returns, "value")
    if len(schema) != 1:
        raise BadRule(
            f"a fetch rule returns one value, not {rule.returns!r}",
            hint='for example -> float, or -> "array<long>"',
            rule=rule.name,
        )
    return schema.field(0).type


def net_neighbours(offsets: NDArray[np.int64], neighbours: pa.Array, added: pa.Array) -> NDArray[np.uint8]:
    """Flags for the events of each range that leave a neighbour there."""
    kept = np.zeros(len(neighbours), np.uint8)
    edges.net(offsets, _ids(neighbours), views.plain(views.longs(added)), SECRET, kept)
    return kept


def _ids(neighbours: pa.Array) -> NDArray[Any]:
    """A long for each neighbour: equal ones have the same."""
    if views.is_bytes(neighbours.type):
        return KeyIndex("bytes", np.zeros(at.SIZE, np.int64)).assign(Keys.from_arrow(neighbours))
    return views.plain(views.longs(neighbours))
