"""Speculative decoding as pure functions on arrays, for use inside your own jit.

One round is `draft`, `verify`, `accept`, `commit`, `select`; `spec_round` is all of them, `decode`
the loop over rounds, `prefill` (or `begin`, for a cache filled by hand) what comes before.
"""

from vegas_jax.spec.loop import begin, decode, prefill
from vegas_jax.spec.round import accept, commit, draft, select, spec_round, verify
from vegas_jax.spec.state import (
    DecodeState,
    Requests,
    cache_rows,
    init_state,
    new_requests,
)

__all__ = [
    "DecodeState",
    "Requests",
    "accept",
    "begin",
    "cache_rows",
    "commit",
    "decode",
    "draft",
    "init_state",
    "new_requests",
    "prefill",
    "select",
    "spec_round",
    "verify",
]
