"""Mixture-of-Experts models of Hugging Face transformers, their experts spread over ranks by moelink.

All models whose experts use transformers' experts interface; none is known by name.

Two ways, described in ``docs/transformers.md``:

* :func:`parallelize` (and :func:`from_pretrained`) change a model in place and leave everything but the experts
  replicated;
* :func:`register` puts moelink into transformers' registry, for ``DistributedConfig(ep_implementation="moelink")``.

Needs the extra ``moelink[transformers]``.
"""

from moelink.integrations.transformers.checkpoint import CheckpointError, LoadReport
from moelink.integrations.transformers.loading import empty_model
from moelink.integrations.transformers.parallel import ParallelModel, from_pretrained, parallelize
from moelink.integrations.transformers.registry import Registration, register

__all__ = [
    "CheckpointError",
    "LoadReport",
    "ParallelModel",
    "Registration",
    "empty_model",
    "from_pretrained",
    "parallelize",
    "register",
]
