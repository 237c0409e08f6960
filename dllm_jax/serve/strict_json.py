"""The JSON of a body, strict: no NaN, no half characters, no integer or nesting beyond measure."""

from typing import Any

import msgspec

from dllm_jax.serve.refusals import Refusal, not_json

MAX_CONTAINERS = 1 << 16  # lists and objects of a body: the garbage collector visits each
_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_MANY_DIGITS = b"0" * 19  # as an integer of more than 64 bits has


def read_object(data: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        Refusal: The body is not of that form.
    """
    _check_containers(data)
    fields = read_json(data)
    if not isinstance(fields, dict):
        raise Refusal("the body is no JSON object; send one object", code="invalid_json")
    return fields


def read_json(data: bytes) -> Any:
    """The JSON of a body: strict, no NaN, no half characters.

    Raises:
        Refusal: The body is not of that form.
    """
    try:
        content = msgspec.json.decode(data)
    except msgspec.ValidationError as error:  # a number that no float holds
        raise not_json(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error) from None
    if _MANY_DIGITS in data.translate(_AS_ZEROS):
        _check_integers(content)
    return content


def _check_containers(data: bytes) -> None:
    """Refuse a body of very many lists and objects before they are made."""
    if data.count(b"[") + data.count(b"{") <= MAX_CONTAINERS:
        return
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside = b"".join(plain.split(b'"')[::2])
    found = outside.count(b"[") + outside.count(b"{")
    if found > MAX_CONTAINERS:
        raise Refusal(
            f"the body has {found} lists and objects; at most {MAX_CONTAINERS} are taken: send "
            "less at once",
            code="invalid_json",
        )


def _check_integers(content: Any) -> None:
    """Refuse integers that neither the pipe nor the device holds, wherever they are."""
    waiting: list[tuple[Any, Any]] = [(content, None)]
    while waiting:
        value, at = waiting.pop()
        if isinstance(value, dict):
            waiting += [(inner, (at, f".{key}")) for key, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(inner, (at, f"[{i}]")) for i, inner in enumerate(value)]
        elif isinstance(value, int) and not -(2**63) <= value < 2**64:
            param = ""
            while at is not None:
                at, step = at
                param = step + param
            param = param.removeprefix(".") or None
            raise Refusal(
                f"{param or 'the body'} is an integer of more than 64 bits; send a smaller one",
                param=param,
            )
