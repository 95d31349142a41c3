"""Who a peer is: an Ed25519 key. The libp2p peer id *is* the public key, so it can check what its owner signed."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2p_muloco.errors import ConfigError

__all__ = ["PEER_ID_BYTES", "PEER_ID_PREFIX", "Identity", "parse_peer_id", "peer_name", "verify"]

PEER_ID_PREFIX = bytes.fromhex("002408011220")  # identity multihash of a libp2p PublicKey{type: Ed25519, data: 32 bytes}
KEY_FILE_PREFIX = bytes.fromhex("08011240")  # libp2p PrivateKey{type: Ed25519, data: seed + public key}
PEER_ID_BYTES = 38
REMEMBERED_BYTES = 256  # a HELLO; 4,096 remembered lists of members could hold 128 MB


class Identity:
    """A signing key and the peer id that goes with it."""

    def __init__(self, seed: bytes) -> None:
        assert len(seed) == 32
        self._seed = seed
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key = self._key.public_key().public_bytes_raw()
        self.peer_id = PEER_ID_PREFIX + self.public_key

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Read the key file p2pd reads too, or write a fresh one that only its owner can read."""
        if not path.exists():
            cls(os.urandom(32)).save(path)
        raw = path.read_bytes()
        if len(raw) != 68 or not raw.startswith(KEY_FILE_PREFIX):
            raise ConfigError(f"identity {path}: not an Ed25519 key file; move it away and a new one is made")
        return cls(raw[4:36])

    def save(self, path: Path) -> None:
        """Write the key file p2pd reads too; only its owner can read it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(KEY_FILE_PREFIX + self._seed + self.public_key)
        temporary.replace(path)

    def sign(self, purpose: bytes, message: bytes) -> bytes:
        """64 bytes. `purpose` keeps a signature made for one kind of record from serving as another."""
        return self._key.sign(_domain(purpose) + message)

    @property
    def stream(self) -> int:
        """The 64-bit number of this peer's sequence of training windows (design: data position is a pure function)."""
        return int.from_bytes(hashlib.sha256(self.peer_id).digest()[:8], "big")


def verify(peer_id: bytes, purpose: bytes, message: bytes, signature: bytes) -> bool:
    """True if the owner of `peer_id` signed `message` for `purpose`."""
    check = _verify_once if len(message) <= REMEMBERED_BYTES else _verify
    return check(peer_id, purpose, message, signature)


def _verify(peer_id: bytes, purpose: bytes, message: bytes, signature: bytes) -> bool:
    if len(peer_id) != PEER_ID_BYTES or not peer_id.startswith(PEER_ID_PREFIX) or len(signature) != 64:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(peer_id[6:]).verify(signature, _domain(purpose) + message)
    except (InvalidSignature, ValueError):
        return False
    return True


_verify_once = functools.lru_cache(maxsize=4096)(_verify)  # a HELLO comes in JOIN, in every START and in the entry


def peer_name(peer_id: bytes) -> str:
    """The base58 form that libp2p shows (12D3Koo...)."""
    return base58.b58encode(peer_id).decode()


def parse_peer_id(text: str) -> bytes:
    return base58.b58decode(text)


def _domain(purpose: bytes) -> bytes:
    return b"p2p-muloco/1/" + purpose + b"\0"
