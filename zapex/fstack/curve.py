"""CURVE: the handshake with keys, and encrypted frames (ZeroMQ's RFC 26), with PyNaCl.

    client                                       server
    HELLO     C', box of zeros (C' to S)      ->
              <-  WELCOME   box of S' and a cookie (S to C')
    INITIATE  cookie, box of C, a vouch       ->
              and properties (C' to S')
              <-  READY     box of properties (S' to C')
    MESSAGE   box of flags and body           <-> (C' to S', S' to C')

C and S are the long-term public keys, C' and S' those of this connection. The cookie holds what the
server must check in INITIATE; the vouch proves that the client has the secret key of C.
"""

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from zapex.errors import BadMessage, ConfigError
from zapex.fstack import zmtp

KEY_BYTES = 32
Random = Callable[[int], bytes]
Admit = Callable[[bytes], str | None]
"""The user that a client's public key stands for; None: it may not connect."""

_MAC_BYTES = 16
_VERSION = b"\1\0"
_MESSAGE = zmtp.command(b"MESSAGE")
_MORE, _COMMAND = 1, 2  # the flags inside a MESSAGE
_BOX_AT = len(_MESSAGE) + 8  # after the nonce: the authentication code, the flags, the body
_INNER_AT = _BOX_AT + _MAC_BYTES
_POINTER = "unsigned char[]"
_OTHER_KEY = "{} cannot be decrypted: another key was used"
_NOT_ADMITTED = b"400"


def _sodium() -> Any:
    """PyNaCl's functions. Raises ConfigError."""
    try:
        from nacl import bindings
    except ImportError:
        raise ConfigError(
            "keys over zmtp:// need PyNaCl, which is not installed: pip install 'zapex[curve]'"
        ) from None
    return bindings


def check_installed() -> None:
    """Raise ConfigError if PyNaCl is missing."""
    _sodium()


def fields(command: str, data: bytes, *sizes: int) -> list[memoryview]:
    """Parts of these sizes, and the rest. Raises BadMessage."""
    if len(data) < sum(sizes):
        raise BadMessage(f"the command {command} is too short")
    found, at = [], 0
    for size in sizes:
        found.append(memoryview(data)[at : at + size])
        at += size
    return [*found, memoryview(data)[at:]]


class CurveServer:
    """The end whose public key the clients know. admit: which clients may connect."""

    name, as_server = b"CURVE", True
    added_bytes = len(_MESSAGE) + 8 + _MAC_BYTES + 1  # and 8 of the nonce, 1 of the flags
    # The prefixes of the nonces of messages.
    sent_as, heard_as = b"CurveZMQMESSAGES", b"CurveZMQMESSAGEC"

    def __init__(
        self,
        socket_type: bytes,
        public: bytes,
        secret: bytes,
        admit: Admit,
        random: Random = os.urandom,
    ) -> None:
        self._sodium = _sodium()
        calls = import_module("nacl.bindings.crypto_box")  # libsodium as those functions call it
        self._ffi, self._lib = calls.ffi, calls.lib
        self._socket_type, self._public, self._secret = socket_type, public, secret
        self._admit, self._random = admit, random
        self._own_secret = random(KEY_BYTES)
        self._own_public = self._sodium.crypto_scalarmult_base(self._own_secret)
        self._cookie_key = random(KEY_BYTES)
        self._peer = b""  # C'
        self._shared = b""  # by both keys of this connection
        self._next = b"HELLO"
        self._sent, self._heard = 0, -1  # nonces
        self.done, self.refused = False, ""
        self.user: str | None = None

    def start(self) -> list[bytes]:
        """Nothing: the client begins."""
        return []

    def take(self, name: bytes, data: bytes) -> list[bytes]:
        """HELLO, then INITIATE."""
        if name != self._next:
            raise BadMessage(f"the peer sent {name[:32]!r}, not {self._next.decode()}")
        if name == b"HELLO":
            self._next = b"INITIATE"
            return [self._welcome(data)]
        return [self._initiate(data)]

    def seal(self, flags: int, body: zmtp.Buffer) -> tuple[int, zmtp.Buffer]:
        """A frame as the body of a MESSAGE, which is sent as a frame without flags."""
        inner = _MORE if flags & zmtp.MORE else _COMMAND if flags & zmtp.COMMAND else 0
        nonce, sealed = self._next_nonce(), zmtp.new_memory(self.added_bytes + len(body))
        sealed[:_BOX_AT] = _MESSAGE + nonce
        sealed[_INNER_AT] = inner
        sealed[_INNER_AT + 1 :] = body
        # In place: PyNaCl's own functions would copy it three times.
        start, sodium = self._ffi.from_buffer(_POINTER, sealed), self._lib
        sodium.crypto_box_easy_afternm(
            start + _BOX_AT, start + _INNER_AT, len(body) + 1, self.sent_as + nonce, self._shared
        )
        return 0, sealed

    def open(self, flags: int, body: zmtp.Buffer) -> tuple[int, zmtp.Buffer]:
        """The inverse; the body becomes what was in it. Raises BadMessage."""
        if len(body) < self.added_bytes or body[: len(_MESSAGE)] != _MESSAGE:
            raise BadMessage("a frame is not a MESSAGE of CURVE")
        nonce = bytes(body[len(_MESSAGE) : _BOX_AT])
        self._check_nonce(nonce)
        start = self._ffi.from_buffer(_POINTER, body, require_writable=True)
        if self._lib.crypto_box_open_easy_afternm(
            start + _INNER_AT,
            start + _BOX_AT,
            len(body) - _BOX_AT,
            self.heard_as + nonce,
            self._shared,
        ):
            raise BadMessage(_OTHER_KEY.format("MESSAGE"))
        inner = body[_INNER_AT]
        if inner > _COMMAND:
            raise BadMessage(f"a MESSAGE has the flags {inner:#04x}, which none may have")
        flags = zmtp.MORE if inner == _MORE else zmtp.COMMAND if inner == _COMMAND else 0
        return flags, body[_INNER_AT + 1 :]

    def _box(self, prefix: bytes, plain: bytes) -> tuple[bytes, bytes]:
        """The next nonce, and a box by both keys of this connection."""
        nonce = self._next_nonce()
        return nonce, self._sodium.crypto_box_easy_afternm(plain, prefix + nonce, self._shared)

    def _next_nonce(self) -> bytes:
        self._sent += 1
        return self._sent.to_bytes(8, "big")

    def _unbox(self, prefix: bytes, nonce: zmtp.Buffer, box: zmtp.Buffer, what: str) -> bytes:
        self._check_nonce(nonce)
        return self._opened(
            what,
            self._sodium.crypto_box_open_easy_afternm,
            bytes(box),
            prefix + nonce,
            self._shared,
        )

    def _check_nonce(self, nonce: zmtp.Buffer | bytes) -> None:
        """Raise BadMessage for a nonce that is not larger than the one before: a repetition."""
        number = int.from_bytes(nonce, "big")
        if number <= self._heard:
            raise BadMessage("a nonce is not larger than the one before it")
        self._heard = number

    def _opened(self, what: str, function: Callable[..., bytes], *arguments: bytes) -> bytes:
        """The result of a function of PyNaCl's. Raises BadMessage."""
        from nacl.exceptions import CryptoError

        try:
            return function(*arguments)
        except CryptoError:
            raise BadMessage(_OTHER_KEY.format(what)) from None

    def _welcome(self, data: bytes) -> bytes:
        version, _, peer, nonce, box, rest = fields("HELLO", data, 2, 72, KEY_BYTES, 8, 80)
        if version != _VERSION or rest:
            raise BadMessage("HELLO is of another version of CURVE, or too long")
        self._check_nonce(nonce)
        self._peer = bytes(peer)
        sodium = self._sodium
        shared = self._opened("HELLO", sodium.crypto_box_beforenm, self._peer, self._secret)
        full = b"CurveZMQHELLO---" + nonce
        if any(self._opened("HELLO", sodium.crypto_box_open_afternm, bytes(box), full, shared)):
            raise BadMessage("HELLO has other bytes than zeros in its box")
        self._shared = sodium.crypto_box_beforenm(self._peer, self._own_secret)
        cookie_nonce, welcome_nonce = self._random(16), self._random(16)
        cookie = cookie_nonce + sodium.crypto_secretbox(
            self._peer + self._own_secret, b"COOKIE--" + cookie_nonce, self._cookie_key
        )
        sealed = sodium.crypto_box_afternm(
            self._own_public + cookie, b"WELCOME-" + welcome_nonce, shared
        )
        return zmtp.command(b"WELCOME", welcome_nonce + sealed)

    def _initiate(self, data: bytes) -> bytes:
        cookie_nonce, cookie, nonce, box = fields("INITIATE", data, 16, 80, 8)
        sodium = self._sodium
        known = self._opened(
            "INITIATE",
            sodium.crypto_secretbox_open,
            bytes(cookie),
            b"COOKIE--" + cookie_nonce,
            self._cookie_key,
        )
        if known != self._peer + self._own_secret:
            raise BadMessage("INITIATE has the cookie of another connection")
        plain = self._unbox(b"CurveZMQINITIATE", nonce, box, "INITIATE")
        client, vouch_nonce, vouch, properties = fields("INITIATE", plain, KEY_BYTES, 16, 80)
        vouched = self._opened(
            "INITIATE",
            sodium.crypto_box_open,
            bytes(vouch),
            b"VOUCH---" + vouch_nonce,
            bytes(client),
            self._own_secret,
        )
        if vouched != self._peer + self._public:
            raise BadMessage("INITIATE has the vouch of another connection")
        self.user = self._admit(bytes(client))
        if self.user is None:
            self.refused = "its key is not admitted"
            return zmtp.command(b"ERROR", zmtp.command(_NOT_ADMITTED))
        zmtp.check_peer(self._socket_type, bytes(properties))
        self.done = True
        own, sealed = self._box(b"CurveZMQREADY---", zmtp.own_properties(self._socket_type))
        return zmtp.command(b"READY", own + sealed)
