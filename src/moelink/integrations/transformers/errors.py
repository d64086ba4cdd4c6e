"""What can be wrong with a checkpoint."""

from __future__ import annotations

from moelink.errors import MoelinkError


class CheckpointError(MoelinkError, RuntimeError):
    """A checkpoint lacks a file or a tensor, or a tensor has another shape than the model.

    Raised on every rank when any rank meets it, before the model is used. Recover: complete the checkpoint (the message
    names what is missing), then load again.
    """
