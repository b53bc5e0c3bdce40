"""Reading a request's body: bounded, strict, and told field by field what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from starlette.requests import ClientDisconnect, Request

from mamba_checkpoint_cache.serving.http.errors import ApiError, bad_request
from mamba_checkpoint_cache.serving.tokens import Tokens

T = TypeVar("T")

MAX_BODY_BYTES = 2**20
MAX_PROMPTS = 256

ASKS_NOTHING: Mapping[str, Any] = {
    "best_of": 1,
    "frequency_penalty": 0,
    "lora_path": "",
    "logprob_start_len": -1,
    "min_new_tokens": 0,
    "min_p": 0,
    "n": 1,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "top_k": -1,
    "top_logprobs_num": 0,
}
"""Fields of SGLang's and OpenAI's that are not supported, with the value at which they ask for nothing; so do null and false."""


class Fields:
    """The fields of a JSON object; each is checked when it is read, and :meth:`close` refuses what nobody read."""

    def __init__(self, body: object, path: str = "") -> None:
        if not isinstance(body, dict):
            raise bad_request(f"{path or 'the body'} must be a JSON object, got {kind_of(body)}", path or None)
        self._fields: dict[str, Any] = body
        self._path = f"{path}." if path else ""
        self._read: set[str] = set()

    def raw(self, name: str) -> Any:
        """The value as it came; None if it is absent or null."""
        self._read.add(name)
        return self._fields.get(name)

    def integer(self, name: str, default: T) -> int | T:
        """A whole number; true and 1.0 are none."""
        value: int | T = self._checked(name, default, "a whole number", _is_whole)
        return value

    def number(self, name: str, default: float) -> float:
        """A number; true is none, nor is a whole number beyond all floats."""
        value = self._checked(name, default, "a number", lambda value: _is_whole(value) or isinstance(value, float))
        try:
            return float(value)
        except OverflowError:
            self._refuse(name, "a number that fits a float", value)

    def flag(self, name: str) -> bool:
        """True or false; false if it is absent."""
        return bool(self._checked(name, False, "true or false", lambda value: isinstance(value, bool)))

    def text(self, name: str) -> str | None:
        """A string."""
        value: str | None = self._checked(name, None, "a string", lambda value: isinstance(value, str))
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A string, or a list of them; none may be empty."""
        value = self.raw(name)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, str) and item for item in listed):
            self._refuse(name, "a string or a list of strings, none of them empty", value)
        return tuple(listed)

    def integers(self, name: str) -> list[int]:
        """A list of whole numbers."""
        value = self.raw(name) or []
        if not _whole_numbers(value):
            self._refuse(name, "a list of whole numbers", value)
        return list(value)

    def section(self, name: str) -> Fields:
        """An object inside; empty if it is absent."""
        value = self.raw(name)
        return Fields({} if value is None else value, f"{self._path}{name}")

    def close(self) -> None:
        """Refuse fields that were not read, unless they ask for nothing."""
        for name, value in self._fields.items():
            if name in self._read or value is None or value is False or (name in ASKS_NOTHING and value == ASKS_NOTHING[name]):
                continue
            raise bad_request(f"{self._path}{name} is not supported here", f"{self._path}{name}")

    def _checked(self, name: str, default: Any, wanted: str, fits: Callable[[Any], bool]) -> Any:
        value = self.raw(name)
        if value is None:
            return default
        if not fits(value):
            self._refuse(name, wanted, value)
        return value

    def _refuse(self, name: str, wanted: str, value: object) -> NoReturn:
        raise bad_request(f"{self._path}{name} must be {wanted}, got {kind_of(value)}", f"{self._path}{name}")


async def read_fields(request: Request) -> Fields:
    """The body of a request as fields.

    Raises:
        ApiError: 413 if it is longer than ``MAX_BODY_BYTES``, 400 if it is not a JSON object.
    """
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise ApiError(413, f"the body is longer than {MAX_BODY_BYTES:,} bytes")
    except ClientDisconnect:
        raise bad_request("the client hung up before its body was complete") from None
    try:
        return Fields(json.loads(body, parse_constant=_no_constant))
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None


@dataclass(frozen=True, slots=True)
class Prompts:
    """The token ids of one or several prompts, and whether they came as a list."""

    tokens: list[list[int]]
    listed: bool


def text_prompts(value: Any, name: str, tokens: Tokens) -> Prompts | None:
    """The prompts in a string or a list of strings; None if it is neither."""
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) for text in texts):
        return None
    _require_few(texts, name)
    try:
        return Prompts([tokens.encode(text) for text in texts], isinstance(value, list))
    except ValueError as error:
        raise bad_request(f"{name} is not valid text: {error}", name) from None


def id_prompts(value: Any, name: str) -> Prompts | None:
    """The prompts in a list of token ids or a list of such lists; None if it is neither."""
    if not isinstance(value, list) or not value:
        return None
    if _whole_numbers(value):
        return Prompts([value], listed=False)
    if not all(_whole_numbers(item) for item in value):
        return None
    _require_few(value, name)
    return Prompts(value, listed=True)


def _require_few(prompts: list[Any], name: str) -> None:
    if len(prompts) > MAX_PROMPTS:
        raise bad_request(f"{name} holds {len(prompts)} prompts, more than {MAX_PROMPTS}", name)


def _whole_numbers(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_whole, value))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def kind_of(value: object) -> str:
    """What a JSON value is, in words."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "true or false",
        int: "a whole number",
        float: "a fraction",
    }
    return names.get(type(value), "null")
