"""Bundled text: what the demonstration reads when it is given nothing else. Provenance in ``NOTICE`` beside it."""

from __future__ import annotations

from importlib.resources import files


def bundled_text() -> bytes:
    """Lewis Carroll's "Alice's Adventures in Wonderland" (public domain), 148476 bytes of ASCII.

    Example:
        >>> bundled_text().split()[:3]
        [b"ALICE'S", b'ADVENTURES', b'IN']
    """
    return files(__name__).joinpath("alice.txt").read_bytes()
