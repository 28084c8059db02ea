"""Types of bodies: the JSON of their values, the values of JSON, and the kinds of messages.

msgspec converts dataclasses, classes of attrs and msgspec, typed dicts, and the dates, numbers,
enums and ids of Python's library; pydantic converts its own classes. msgspec is strict: text is not
a number, and 1 is not True.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import ujson

from qdo.encoding import JsonText, is_utf8
from qdo.errors import UsageError
from qdo.text import one_line, printable

MAX_KIND = 200
# Bodies of these types have no kind. A look at this set is all that such a body costs its sender.
PLAIN = frozenset({dict, list, str, bytes, JsonText, int, float, bool, type(None), tuple})
# Attributes of the classes of msgspec, pydantic and attrs.
_MARKS = ("__struct_fields__", "__pydantic_validator__", "__attrs_attrs__")


class MisfitError(ValueError):
    """A value does not fit a type; the text begins with the path of the part, such as ``$.id``."""


class BodyType:
    """A type of bodies.

    :ivar kind: the kind of messages with such a body; None for a type without named fields.
    :ivar name: the name of the type, for errors.
    :raises UsageError: neither msgspec nor pydantic can convert the type.
    """

    def __init__(self, type: Any) -> None:
        from msgspec import convert  # takes 5 ms, which apps without types save

        if _is_pydantic(type):
            self._converted = functools.partial(_validated, type)
        else:
            options = {"type": type, "str_keys": True, "dec_hook": _load_inner}
            self._converted = functools.partial(convert, **options)
        self.type = type
        self.kind = kind_of(type)
        self.name = self.kind or str(type)
        try:
            self._converted(None)
        except ValueError:
            pass  # the type is known, and None does not fit it
        except Exception as error:
            raise UsageError(
                reason=f"the type of a body must be one that msgspec or pydantic supports, got "
                f"{self.name}: {one_line(error)}"
            ) from error

    def load(self, value: Any) -> Any:
        """Return the value of a JSON value, or raise MisfitError.

        Other errors of the type's own checks pass through, because a later attempt may succeed: a
        database that a check asks may be away.
        """
        try:
            return self._converted(value)
        except (ValueError, TypeError) as error:
            raise MisfitError(_reason(error)) from error


def body_type(type: Any) -> BodyType:
    """Return a type of bodies; raise UsageError if it cannot be converted."""
    try:
        return _body_type(type)
    except TypeError as error:  # it has no hash, so it is an object of a class
        raise UsageError(reason=f"a body's type must be a class, got {type!r:.80}") from error


@functools.lru_cache(1024)
def _body_type(type: Any) -> BodyType:
    return BodyType(type)


def loaded(type: Any, value: Any) -> Any:
    """Return a JSON value as a type, unchanged for None; raise MisfitError with the type's name."""
    if type is None:
        return value
    expected = body_type(type)
    try:
        return expected.load(value)
    except MisfitError as error:
        raise MisfitError(f"it must fit {expected.name}: {error}") from error


@functools.lru_cache(1024)
def kind_of(type: Any) -> str | None:
    """Return the kind of messages whose body has a type; None for a type without named fields."""
    has_fields = (
        dataclasses.is_dataclass(type)
        or typing.is_typeddict(type)
        or any(hasattr(type, mark) for mark in _MARKS)
    )
    return str(type.__name__) if has_fields and inspect.isclass(type) else None


def checked_kind(kind: Any) -> str:
    if not isinstance(kind, str) or not 0 < len(kind) <= MAX_KIND or not is_utf8(kind):
        rule = f"text of 1 to {MAX_KIND} characters, without surrogates"
        raise UsageError(reason=f"the kind of a message must be {rule}, got {kind!r:.80}")
    return kind


def checked_body(what: str, body: Any, expected: BodyType) -> Any:
    """Return a body as JSON or bytes; raise UsageError if it would not arrive as a type.

    :param what: the name of the body, for the error.
    """
    try:
        is_raw = isinstance(body, bytes | bytearray | memoryview)
        value = bytes(body) if is_raw else _plain(body)
        expected.load(value)
    except ValueError as error:
        raise UsageError(reason=f"{what} must fit {expected.name}: {error}") from error
    return value


def plain_value(what: str, value: Any) -> Any:
    """Return an object with named fields as JSON, and any other value unchanged."""
    type: Any = value.__class__
    if type in PLAIN or kind_of(type) is None:
        return value
    return checked_body(what, value, body_type(type))


def annotated_type(function: Callable[..., Any], generics: tuple[type, ...]) -> Any:
    """Return T if the first parameter of a job is annotated as ``Message[T]``, else None.

    :param generics: the classes, or their bases, that may stand before the brackets.
    :raises UsageError: the annotation has a name that does not exist.
    """
    called = inspect.unwrap(function)
    try:
        parameters = inspect.signature(called).parameters
    except (TypeError, ValueError):
        return None  # some callables written in C have no signature
    hint = next((each.annotation for each in parameters.values()), None)
    if isinstance(hint, str):
        hint = _evaluated(hint, called) if "[" in hint else None
    origin = typing.get_origin(hint)
    if not (isinstance(origin, type) and issubclass(origin, generics)):
        return None
    found = typing.get_args(hint)[0]
    return None if found is Any or isinstance(found, typing.TypeVar) else found


def _evaluated(hint: str, function: Callable[..., Any]) -> Any:
    def holder() -> None: ...

    # Annotations of other parameters may have names that exist for type checkers only.
    holder.__annotations__ = {"hint": hint}
    names = getattr(function, "__globals__", {})
    try:
        return typing.get_type_hints(holder, names)["hint"]
    except Exception as error:
        raise UsageError(
            reason=f"job {function!r}: the annotation {hint!r} must have only names that its "
            f"module has when it registers the job: {one_line(error)}; import them at run time, "
            "or add body= to @app.job"
        ) from error


def _plain(value: Any) -> Any:
    """Return an object and its parts as JSON; raise ValueError if a part has no such form."""
    from msgspec import to_builtins

    try:
        if _is_pydantic(type(value)):
            return _dumped(value)
        # "deterministic" sorts sets: the digests of `once` and requests must not differ.
        return to_builtins(value, str_keys=True, order="deterministic", enc_hook=_dump_inner)
    except Exception as error:
        raise ValueError(one_line(error)) from error


def _dump_inner(value: Any) -> Any:
    if not _is_pydantic(type(value)):
        raise TypeError(f"a {type(value).__qualname__} has no form in JSON")
    return _dumped(value)


def _load_inner(type: Any, value: Any) -> Any:
    if not _is_pydantic(type):
        raise TypeError(f"{type!r} is not supported")
    try:
        return _validated(type, value)
    except ValueError as error:
        raise ValueError(_reason(error)) from error


def _is_pydantic(type: Any) -> bool:
    return hasattr(type, "__pydantic_validator__")


@functools.lru_cache(1024)
def _adapter(type: Any) -> Any:
    from pydantic import TypeAdapter  # installed, because the type is one of its own

    return TypeAdapter(type)


def _validated(type: Any, value: Any) -> Any:
    adapter = _adapter(type)
    try:
        return adapter.validate_python(value)
    except ValueError:
        # Strict classes accept text as a date only from JSON, which takes 1.7 times as long.
        return adapter.validate_json(ujson.dumps(value))


def _dumped(value: Any) -> Any:
    adapter = _adapter(value.__class__)
    return adapter.dump_python(value, mode="json", by_alias=True, round_trip=True)


def _reason(error: Exception) -> str:
    """Return the path of the wrong part and the rule for it."""
    if hasattr(error, "errors"):  # of pydantic
        first, *others = error.errors(include_url=False, include_input=False)
        parts = (f"[{each}]" if isinstance(each, int) else f".{each}" for each in first["loc"])
        place = "$" + "".join(parts)
        text = first["msg"] + (f" (and {len(others)} more)" if others else "")
    else:
        # msgspec writes "Expected `int`, got `str` - at `$.lines[2].price`".
        text, _, place = one_line(error).replace("`", "").rpartition(" - at ")
    rule = text or place
    return printable(one_line(f"{place if text else '$'}: {rule[:1].lower()}{rule[1:]}"))
