"""Types of bodies: what they convert, what they refuse, and the kinds that they give messages."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import math
import uuid
from decimal import Decimal
from typing import Annotated, Any, TypedDict

import attrs
import msgspec
import pydantic
import pydantic.dataclasses
import pytest
import ujson

from qdo.bodies import MisfitError, body_type, checked_body, kind_of, loaded, plain_value
from qdo.encoding import strict_json
from qdo.errors import UsageError


class Model(pydantic.BaseModel):
    order: int = pydantic.Field(alias="Order")
    on: datetime.date


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Line:
    price: Decimal
    color: Color = Color.RED
    model: Model | None = None


@dataclasses.dataclass
class Order:
    id: uuid.UUID
    at: datetime.datetime
    on: datetime.date
    lines: list[Line]
    counts: dict[int, int]
    tags: set[str]


class Struct(msgspec.Struct):
    order: int
    at: datetime.datetime | None = None


class StrictModel(pydantic.BaseModel, strict=True, extra="forbid"):
    on: datetime.date
    color: Color
    pair: tuple[int, int]

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def sum(self) -> int:
        return sum(self.pair)


@pydantic.dataclasses.dataclass
class Checked:
    order: Annotated[int, pydantic.Field(gt=3)]


@attrs.define
class Attrs:
    order: float

    def __attrs_post_init__(self) -> None:
        if self.order <= 0:
            raise ValueError("Order must be positive")


class Typed(TypedDict):
    at: datetime.datetime
    price: Decimal


NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC)
DAY = datetime.date(2026, 1, 2)
MODEL = Model(Order=1, on=DAY)
LINE = Line(Decimal("1.10"), model=MODEL)
ORDER = Order(uuid.UUID(int=1), NOW, DAY, [LINE], {7: 1}, {"b", "a", "c"})
STRICT = StrictModel(on=DAY, color=Color.RED, pair=(1, 2))
OBJECTS = [ORDER, Struct(1, NOW), MODEL, STRICT, Checked(4), Attrs(1), LINE]


def arrived(value: Any, expected: Any) -> Any:
    """Return a value after its way through JSON."""
    stored = strict_json(checked_body("the body", value, body_type(expected)))
    return loaded(expected, ujson.loads(stored))


@pytest.mark.parametrize("value", OBJECTS, ids=lambda each: type(each).__name__)
def test_an_object_arrives_equal(value: Any) -> None:
    """With dates, numbers and ids within it, an alias, and keys that are numbers."""
    assert arrived(value, type(value)) == value
    assert plain_value("it", value) == checked_body("it", value, body_type(type(value)))
    assert kind_of(type(value)) == type(value).__name__


def test_a_dict_arrives_by_the_type_of_its_job() -> None:
    """A dict does not know its type. Bytes stay as they are."""
    value = {"at": NOW, "price": Decimal("1.10")}
    assert arrived(value, Typed) == value
    assert checked_body("the body", b"\xff", body_type(bytes)) == b"\xff"
    assert arrived({"Order": 1, "on": DAY}, Model) == MODEL
    assert arrived([Struct(1)], list[Struct]) == [Struct(1)]
    assert plain_value("it", ORDER)["tags"] == ["a", "b", "c"]  # digests of equal sets are equal
    assert (kind_of(Typed), kind_of(list[Struct]), kind_of(dict)) == ("Typed", None, None)


@pytest.mark.parametrize(
    ("type", "value", "path"),
    [
        (Order, {"id": str(uuid.UUID(int=1))}, "$: object missing required field at"),
        (Line, {"price": [1]}, "$.price: expected decimal, got array"),
        (list[Line], [{"price": "1"}, {"price": "x"}], "$[1].price: "),
        (Struct, {"order": "1"}, "$.order: expected int, got str"),
        (Struct, {"order": True}, "$.order: expected int, got bool"),
        (Struct, b"\xff", "$: expected object, got bytes"),
        (dict[int, int], {"x": 1}, "key in $: "),
        (Color, "blue", "$: invalid enum value 'blue'"),
        (Model, {"Order": "x", "on": 5}, "$.Order: input should be a valid integer"),
        (StrictModel, {"on": "2026-01-02", "color": "red", "pair": [1, "2"]}, "$.pair[1]: "),
        (Checked, {"order": 3}, "$.order: "),
        (Line, {"price": "1", "model": {"Order": 1}}, "$.model: $.on: "),
        (Attrs, {"order": -1}, "$: order must be positive"),
    ],
)
def test_an_error_names_the_part(type: Any, value: Any, path: str) -> None:
    with pytest.raises(MisfitError) as caught:
        body_type(type).load(value)
    assert str(caught.value).startswith(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Struct("x"), Struct),  # type: ignore[arg-type]
        (Line(complex(1, 2)), Line),  # type: ignore[arg-type]
        (Model.model_construct(order=1), Model),
        ({"order": 1}, Typed),
        (b"{}", Typed),
        (Line(Decimal(1), model=object()), Line),  # type: ignore[arg-type]
    ],
)
def test_a_sender_refuses_a_misfit(value: Any, expected: Any) -> None:
    with pytest.raises(UsageError):
        checked_body("the body", value, body_type(expected))


def test_infinity_is_not_json() -> None:
    """msgspec would store null."""
    with pytest.raises(ValueError):  # noqa: PT011 - of ujson
        arrived(Attrs(math.inf), Attrs)


@pytest.mark.parametrize("type", ["Struct", Struct(1), Line | Order, Struct | Attrs | Model, 5])
def test_an_unknown_type_is_refused(type: Any) -> None:
    with pytest.raises(UsageError):
        body_type(type)
