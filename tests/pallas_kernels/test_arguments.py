"""Arguments that the ops cannot take end in one sentence that names them."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gather_blocks, select_top_k, sparse_attention, verify_attention

Q = jnp.ones((2, 3, 4, 8))
CACHE = jnp.ones((2, 2, 32, 8))
NUMBER = jnp.array([8, 16], jnp.int32)
BLOCKS = jnp.zeros((2, 2), jnp.int32)


def verify(**changes):
    arguments = {"q": Q, "k": CACHE, "v": CACHE, "lengths": NUMBER, **changes}
    return verify_attention(**arguments)


def sparse(**changes):
    arguments = {"q": Q, "k": CACHE, "v": CACHE, "blocks": BLOCKS, "counts": NUMBER // 8}
    settings = {"lengths": NUMBER, "block_size": 4, "tail_start": NUMBER, "max_tail": 4}
    return sparse_attention(**{**arguments, **settings, **changes})


def gather(**changes):
    arguments = {"k": CACHE, "v": CACHE, "blocks": BLOCKS, "counts": NUMBER // 8}
    return gather_blocks(**{**arguments, "block_size": 4, **changes})


def select(**changes):
    return select_top_k(**{"scores": jnp.ones((2, 9)), "k": NUMBER, "max_k": 3, **changes})


@pytest.mark.parametrize(
    ("op", "changes"),
    [
        (verify, {"q": Q[:0], "k": CACHE[:0], "v": CACHE[:0], "lengths": NUMBER[:0]}),
        (verify, {"q": [1.0]}),
        (verify, {"v": None}),
        (verify, {"lengths": [1.0, 2.0]}),
        (verify, {"lengths": None}),
        (verify, {"slots": [0]}),
        (verify, {"score_block": 8.0}),
        (verify, {"score_block": True}),
        (verify, {"score_block": 0}),
        (verify, {"score_block": 5, "scores": "last"}),
        (verify, {"window": 2.5}),
        (verify, {"window": 0}),
        (verify, {"window": 2**31}),
        (verify, {"scores": "last", "window": 4}),
        (verify, {"sinks": [1.0, 2.0]}),
        (verify, {"sinks": np.ones(4, bool)}),
        (verify, {"scale": jnp.ones(3)}),
        (verify, {"scale": "1"}),
        (sparse, {"block_size": 8.0}),
        (sparse, {"block_size": 5}),
        (sparse, {"max_tail": None}),
        (sparse, {"max_tail": 2}),
        (sparse, {"max_tail": 33}),
        (sparse, {"counts": [1]}),
        (sparse, {"tail_start": 3}),
        (sparse, {"blocks": jnp.zeros((3, 2), jnp.int32)}),
        (sparse, {"gathered": 3}),
        (gather, {"k": CACHE[0]}),
        (gather, {"v": CACHE[..., :4]}),
        (select, {"scores": [1.0]}),
        (select, {"k": [1]}),
        (select, {"max_k": 2.5}),
    ],
)
def test_bad_arguments_are_named(op, changes):
    named = "|".join(changes)
    with pytest.raises(ValueError, match=rf"^`({named})` [^\n]*\.$"):
        op(**changes)


def test_lists_and_other_integers_are_taken():
    expected = verify(slots=jnp.array([1, 0], jnp.int32))
    actual = verify(slots=[1, 0], lengths=np.array([8, 16]), scale=np.float32(8) ** -0.5)
    for x, y in zip(actual[:2], expected[:2], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
