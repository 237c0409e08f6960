"""Messages of `pipe` as bytes of a socket: array-like msgpack after a length and an id.

Nothing here is pickled.
"""

import struct
from typing import Any, NamedTuple

import msgspec

from dllm_jax.serve.pipe import Message

MAX_FRAME = 64 << 20  # bytes of one message
READ_BYTES = 1 << 20  # of the socket at a time
_LENGTH = struct.Struct(">I")
_ID = struct.Struct(">q")  # of the request; it is known where the rest cannot be read
NO_ID = -1
_ENCODER = msgspec.msgpack.Encoder()


def frame(message: Message) -> bytes:
    """A message as it goes over the socket.

    Raises:
        ValueError: It is too long.
    """
    data = _ENCODER.encode(message)
    if len(data) > MAX_FRAME - _ID.size:
        raise ValueError(f"a message of {len(data)} bytes is over {MAX_FRAME}; send less at once")
    return _LENGTH.pack(_ID.size + len(data)) + _ID.pack(getattr(message, "id", NO_ID)) + data


class Broken(NamedTuple):
    """A message that cannot be read; those around it can.

    Attributes:
        id: Its request's, or `NO_ID`.
    """

    id: int
    error: Exception


class Reader:
    """Messages from bytes that come in any portions.

    Args:
        kind: `ToEngine` or `FromEngine`.
    """

    def __init__(self, kind: Any):
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are complete now, and a `Broken` for each that cannot be read.

        Raises:
            ValueError: The other end does not speak this protocol.
        """
        self._buffer += data
        messages, at = [], 0
        while len(self._buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            if length > MAX_FRAME:
                raise ValueError(f"a message of {length} bytes; at most {MAX_FRAME} are taken")
            start = at + _LENGTH.size
            if len(self._buffer) < start + length:
                break
            at = start + length
            messages.append(self._message(bytes(self._buffer[start:at])))
        if at:
            del self._buffer[:at]
        return messages

    def _message(self, data: bytes) -> Any:
        if len(data) < _ID.size:
            return Broken(NO_ID, ValueError(f"a message of {len(data)} bytes has no id"))
        try:
            return self._decoder.decode(memoryview(data)[_ID.size :])
        except Exception as error:  # whatever the bytes are, the next message is another's
            return Broken(_ID.unpack_from(data)[0], error)
