"""The Triton kernel of `select_top_k` (import it lazily)."""

import triton
import triton.language as tl


@triton.jit
def select_kernel(
    keys_ptr,  # [N, SIZE], uint32 in the order of the scores; 0 is never taken
    k_ptr,  # [N]
    positions_ptr,  # [N, MAX_K]
    counts_ptr,  # [N]
    SIZE: tl.constexpr,
    MAX_K: tl.constexpr,
    CHUNK: tl.constexpr,  # at most 2**14
):
    """Selects in one row: counts what can be taken, finds the k-th highest key, compacts.

    The k-th highest key is found two bits at a time from the top: a digit is the highest with which
    at least k keys are no lower.
    """
    n = tl.program_id(0).to(tl.int64)
    keys_ptr += n * SIZE
    positions_ptr += n * MAX_K
    lane = tl.arange(0, CHUNK)

    candidates = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, SIZE, CHUNK):
        index = start + lane
        keys = tl.load(keys_ptr + index, mask=index < SIZE, other=0)
        candidates += (keys > 0).to(tl.int32)
    count = tl.minimum(tl.load(k_ptr + n), tl.minimum(tl.sum(candidates), MAX_K))
    count = tl.maximum(count, 0)
    tl.store(counts_ptr + n, count)

    threshold = tl.full((), 0, tl.uint32)
    one = tl.full((), 0x40000000, tl.uint32)  # the lower bit of a digit
    for _ in range(16):
        reach1 = tl.zeros((CHUNK,), tl.int32)
        reach2 = tl.zeros((CHUNK,), tl.int32)
        reach3 = tl.zeros((CHUNK,), tl.int32)
        for start in range(0, SIZE, CHUNK):
            index = start + lane
            keys = tl.load(keys_ptr + index, mask=index < SIZE, other=0)
            reach1 += (keys >= threshold + one).to(tl.int32)
            reach2 += (keys >= threshold + 2 * one).to(tl.int32)
            reach3 += (keys >= threshold + 3 * one).to(tl.int32)
        digit = (tl.sum(reach1) >= count).to(tl.uint32)
        digit += (tl.sum(reach2) >= count).to(tl.uint32)
        digit += (tl.sum(reach3) >= count).to(tl.uint32)
        threshold += digit * one
        one >>= 2

    above = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, SIZE, CHUNK):
        index = start + lane
        keys = tl.load(keys_ptr + index, mask=index < SIZE, other=0)
        above += (keys > threshold).to(tl.int32)
    ties_taken = count - tl.sum(above)  # of the keys at the threshold, those that come first

    above_before = tl.full((), 0, tl.int32)
    ties_before = tl.full((), 0, tl.int32)
    for start in range(0, SIZE, CHUNK):
        index = start + lane
        keys = tl.load(keys_ptr + index, mask=index < SIZE, other=0)
        is_above, is_tie = keys > threshold, keys == threshold
        both = is_above.to(tl.int32) + (is_tie.to(tl.int32) << 16)  # one scan counts both
        scan = tl.cumsum(both, axis=0)
        ties = ties_before + (scan >> 16)  # up to this one and with it
        taken = is_above | (is_tie & (ties <= ties_taken))
        rank = above_before + (scan & 0xFFFF) + tl.minimum(ties, ties_taken)
        tl.store(positions_ptr + rank - 1, index, mask=taken)
        found = tl.sum(both)
        above_before += found & 0xFFFF
        ties_before += found >> 16

    for start in range(0, MAX_K, CHUNK):
        rank = start + lane
        tl.store(positions_ptr + rank, 0, mask=(rank >= count) & (rank < MAX_K))
