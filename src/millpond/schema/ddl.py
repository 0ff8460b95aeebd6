"""Spark DDL type strings to Arrow schemas and back, without a JVM."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple, NoReturn

import pyarrow as pa

from millpond.errors import BadType

# Columns of rows and questions on their way, beside the user's own.
KEY, TIME, LOW, SEQ = "_key", "_time", "_low", "_seq"
RESERVED_NAMES = (KEY, TIME, LOW, SEQ)
DEPTH_MAX = 32
DECIMAL_DIGITS_MAX = 38

_PLAIN: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_NAME_OF = {type_: name for name, type_ in _PLAIN.items()}
_ALIASES = {
    "tinyint": "byte",
    "smallint": "short",
    "integer": "int",
    "bigint": "long",
    "real": "float",
    "timestamp_ltz": "timestamp",
}
_DECIMALS = ("decimal", "dec", "numeric")
_KNOWN = (*_PLAIN, "decimal(p,s)", "array<T>", "map<K,V>", "struct<name:T,...>")
_INSTEAD = {
    "char": "string",
    "varchar": "string",
    "text": "string",
    "str": "string",
    "bool": "boolean",
    "int8": "byte",
    "int16": "short",
    "int32": "int",
    "int64": "long",
    "float32": "float",
    "float64": "double",
    "bytes": "binary",
    "datetime": "timestamp",
    "list": "array<T>",
    "dict": "map<K,V>",
    "variant": "string",
    "interval": "long",
}

_TOKEN = re.compile(
    r"""\s+
      | (?P<quoted>`(?:[^`]|``)+`)
      | (?P<text>'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*")
      | (?P<word>\w+)
      | (?P<mark>[<>(),:])
    """,
    re.VERBOSE | re.DOTALL,
)
_UNQUOTED_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class _Token(NamedTuple):
    kind: str
    text: str

    def __str__(self) -> str:
        return f"'{self.text}'" if self.text else "the end"


_END = _Token("end", "")


def parse_ddl(ddl: str, bare: str) -> pa.Schema:
    """The schema that a DDL string names.

    A lone type (`"long"`, `"array<float>"`) gives one field called `bare`; `"ad long, region string"` gives one
    field per column. Every field is nullable: `NOT NULL` and `COMMENT '...'` are accepted and ignored.
    """
    if not isinstance(ddl, str):
        raise BadType(
            f"a type is a DDL string, not {type(ddl).__name__}",
            hint='write it as in "ad long, region string"',
        )
    return _parse(ddl, bare)


@lru_cache(maxsize=256)
def _parse(ddl: str, bare: str) -> pa.Schema:
    return _Parser(ddl).schema(bare)


def format_ddl(schema: pa.Schema) -> str:
    """The canonical DDL of a schema: `parse_ddl(format_ddl(schema), ...)` equals the schema.

    A type that DDL has no word for (another time unit, unsigned integers, ...) is a `BadType`.
    """
    return ", ".join(f"{_format_name(field.name)} {format_type(field.type)}" for field in schema)


def format_type(type_: pa.DataType) -> str:
    """The canonical DDL of one type."""
    if type_ in _NAME_OF:
        return _NAME_OF[type_]
    if pa.types.is_decimal128(type_) and 0 <= type_.scale <= type_.precision:
        return f"decimal({type_.precision},{type_.scale})"
    if pa.types.is_list(type_):
        return f"array<{format_type(type_.value_type)}>"
    if pa.types.is_map(type_):
        return f"map<{format_type(type_.key_type)},{format_type(type_.item_type)}>"
    if pa.types.is_struct(type_):
        return f"struct<{','.join(f'{_format_name(f.name)}:{format_type(f.type)}' for f in type_)}>"
    raise BadType(f"the Arrow type {type_} has no DDL name", hint=f"the types are {', '.join(_KNOWN)}")


def describe_type(type_: pa.DataType) -> str:
    """A name for any Arrow type, for messages: its DDL where it has one, else Arrow's own."""
    try:
        return format_type(type_)
    except BadType:
        return str(type_)


def _format_name(name: str) -> str:
    return name if _UNQUOTED_NAME.fullmatch(name) else "`" + name.replace("`", "``") + "`"


class _Parser:
    """Recursive descent over the tokens of one DDL string."""

    def __init__(self, ddl: str) -> None:
        self.ddl = ddl
        self.tokens = self.tokenise()
        self.at = 0

    def tokenise(self) -> list[_Token]:
        tokens = []
        position = 0
        while position < len(self.ddl):
            match = _TOKEN.match(self.ddl, position)
            if match is None:
                self.fail(
                    f"unexpected {self.ddl[position]!r} at position {position}",
                    "names with other characters than letters, digits and _ go in `backquotes`",
                )
            if match.lastgroup is not None:
                tokens.append(_Token(match.lastgroup, match.group()))
            position = match.end()
        return tokens

    def fail(self, what: str, hint: str = "") -> NoReturn:
        shown = self.ddl if len(self.ddl) <= 200 else self.ddl[:200] + "..."
        raise BadType(
            f"cannot read the type {shown!r}: {what}",
            hint=hint or 'write a type ("long") or named columns ("ad long, region string")',
            ddl=self.ddl,
        )

    def peek(self, ahead: int = 0) -> _Token:
        at = self.at + ahead
        return self.tokens[at] if at < len(self.tokens) else _END

    def next(self) -> _Token:
        token = self.peek()
        self.at += 1
        return token

    def expect(self, mark: str, context: str) -> None:
        token = self.next()
        if token.text != mark or token.kind != "mark":
            self.fail(f"expected '{mark}' {context}, found {token}")

    def accept(self, mark: str) -> bool:
        if self.peek() == _Token("mark", mark):
            self.at += 1
            return True
        return False

    def is_word(self, word: str, ahead: int = 0) -> bool:
        token = self.peek(ahead)
        return token.kind == "word" and token.text.lower() == word

    def schema(self, bare: str) -> pa.Schema:
        if not self.tokens:
            self.fail("it is empty")
        if self.is_lone_type():
            fields = [pa.field(bare, self.type(depth=0))]
            self.skip_constraints()
        else:
            fields = self.columns()
        if self.peek() is not _END:
            self.fail(
                f"expected the end, found {self.peek()}", "separate columns by commas, and give each a name"
            )
        for field in fields:
            if field.name in RESERVED_NAMES:
                self.fail(f"the name {field.name} is reserved", "give the column another name")
        return pa.schema(fields)

    def is_lone_type(self) -> bool:
        """Whether one type follows, not columns. Columns may be named as types are: `date date` is a column."""
        if self.peek().kind != "word":
            return False
        following = self.peek(1)
        return (
            following is _END
            or (following.kind == "mark" and following.text in "<(")
            or (self.is_word("not", 1) and self.is_word("null", 2))
            or (self.is_word("comment", 1) and self.peek(2).kind == "text")
        )

    def columns(self) -> list[pa.Field]:
        fields = [self.column(depth=0)]
        while self.accept(","):
            fields.append(self.column(depth=0))
        self.check_distinct(fields)
        return fields

    def column(self, depth: int) -> pa.Field:
        name = self.name()
        self.accept(":")
        if self.peek() is _END or (self.peek().kind == "mark" and self.peek().text in ",>"):
            self.fail(f"column '{name}' has no type", "write `name type`, separated by commas")
        type_ = self.type(depth)
        self.skip_constraints()
        return pa.field(name, type_)

    def name(self) -> str:
        token = self.next()
        if token.kind == "quoted":
            return token.text[1:-1].replace("``", "`")
        if token.kind == "word" and not token.text.isdigit():
            return token.text
        self.fail(f"expected a column name, found {token}")

    def check_distinct(self, fields: list[pa.Field]) -> None:
        seen: set[str] = set()
        for field in fields:
            folded = field.name.lower()
            if folded in seen:
                self.fail(
                    f"the name '{field.name}' occurs twice", "Spark takes names for equal whatever their case"
                )
            seen.add(folded)

    def skip_constraints(self) -> None:
        if self.is_word("not"):
            self.at += 1
            if not self.is_word("null"):
                self.fail(f"expected NULL after NOT, found {self.peek()}")
            self.at += 1
        if self.is_word("comment"):
            self.at += 1
            if self.next().kind != "text":
                self.fail("COMMENT needs a quoted text")

    def type(self, depth: int) -> pa.DataType:
        if depth > DEPTH_MAX:
            self.fail(f"nested more than {DEPTH_MAX} levels deep")
        token = self.next()
        if token.kind != "word":
            self.fail(f"expected a type, found {token}", f"the types are {', '.join(_KNOWN)}")
        word = token.text.lower()
        word = _ALIASES.get(word, word)
        if word in _PLAIN:
            return _PLAIN[word]
        if word in _DECIMALS:
            return self.decimal()
        if word == "array":
            return self.array(depth)
        if word == "map":
            return self.map(depth)
        if word == "struct":
            return self.struct(depth)
        instead = _INSTEAD.get(word)
        self.fail(
            f"unknown type '{token.text}'",
            f"use {instead}" if instead is not None else f"the types are {', '.join(_KNOWN)}",
        )

    def decimal(self) -> pa.DataType:
        precision, scale = 10, 0
        if self.accept("("):
            precision = self.number()
            if self.accept(","):
                scale = self.number()
            self.expect(")", "after decimal(p,s")
        if not 1 <= precision <= DECIMAL_DIGITS_MAX or scale > precision:
            self.fail(
                f"decimal({precision},{scale}) is out of range",
                f"decimal(p,s) needs 1 <= p <= {DECIMAL_DIGITS_MAX} and 0 <= s <= p",
            )
        return pa.decimal128(precision, scale)

    def number(self) -> int:
        token = self.next()
        if token.kind != "word" or not re.fullmatch(r"[0-9]{1,9}", token.text):
            self.fail(
                f"expected a number of digits, found {token}", "write decimal(p,s), as in decimal(10,2)"
            )
        return int(token.text)

    def array(self, depth: int) -> pa.DataType:
        self.expect("<", "after array")
        element = self.type(depth + 1)
        self.expect(">", "to close array<")
        return pa.list_(element)

    def map(self, depth: int) -> pa.DataType:
        self.expect("<", "after map")
        key = self.type(depth + 1)
        self.expect(",", "between the key and the value of map<")
        item = self.type(depth + 1)
        self.expect(">", "to close map<")
        return pa.map_(key, item)

    def struct(self, depth: int) -> pa.DataType:
        self.expect("<", "after struct")
        if self.accept(">"):
            return pa.struct([])
        fields = [self.column(depth + 1)]
        while self.accept(","):
            fields.append(self.column(depth + 1))
        self.expect(">", "to close struct<")
        self.check_distinct(fields)
        return pa.struct(fields)
