"""The Triton kernels of `grouped_matmul` (import it lazily)."""

import triton
import triton.language as tl

# Four weights of four bits (E2M1: sign, two bits of exponent, one of mantissa) in each of two
# words. A weight's bits, moved to where bfloat16 has its sign and the low end of its exponent, are
# the weight over 2**126. The factor makes up for half of that, so that it need not exceed what
# bfloat16 can hold; what is left of it is up to the sum.
_UNPACK = tl.constexpr(
    """
    {
    .reg .b32 sign, bits, zero;
    mov.b32 zero, 0x80008000;
    """
    + "".join(
        f"""
    shl.b32 sign, $4, {12 - 4 * i};
    and.b32 sign, sign, 0x80008000;
    {"shl" if i < 2 else "shr"}.b32 bits, $4, {abs(6 - 4 * i)};
    and.b32 bits, bits, 0x01C001C0;
    or.b32 bits, bits, sign;
    fma.rn.bf16x2 ${i}, bits, $5, zero;
    """
        for i in range(4)
    )
    + "}"
)
_LEFT = tl.constexpr(2.0**63)  # of 2**126


@triton.jit
def find_rows(sizes_ptr, block, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """The group of a block, its first row, and its number of rows: none of a block too many.

    A group's rows are cut into blocks of ROWS; the blocks of all groups are numbered in order.
    """
    TILE: tl.constexpr = triton.next_power_of_2(GROUPS)
    g = tl.arange(0, TILE)
    sizes = tl.load(sizes_ptr + g, mask=g < GROUPS, other=0)
    blocks = (sizes + ROWS - 1) // ROWS
    group = tl.sum((tl.cumsum(blocks, 0) <= block).to(tl.int32), 0)
    skipped = (block - tl.sum(tl.where(g < group, blocks, 0), 0)) * ROWS
    first = tl.sum(tl.where(g < group, sizes, 0), 0) + skipped
    left = tl.sum(tl.where(g == group, sizes, 0), 0) - skipped
    return group, first, tl.where(group < GROUPS, tl.minimum(left, ROWS), 0)


@triton.jit
def grouped_kernel(
    x_ptr,  # [M, K]
    weights_ptr,  # [GROUPS, K, N]
    sizes_ptr,  # [GROUPS]
    out_ptr,  # [M, N]
    K: tl.constexpr,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Multiplies a block of a group's rows by some columns of its matrix."""
    group, first, count = find_rows(sizes_ptr, tl.program_id(1), GROUPS, ROWS)
    if count > 0:
        row = tl.arange(0, ROWS)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inner = tl.arange(0, INNER)
        xs = x_ptr + (first + row).to(tl.int64)[:, None] * K + inner[None, :]
        matrix = weights_ptr + group.to(tl.int64) * K * N + inner[:, None] * N + column[None, :]
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, K, INNER):
            in_matrix = inner < K - start
            x = tl.load(xs, mask=(row < count)[:, None] & in_matrix[None, :], other=0.0)
            mask = in_matrix[:, None] & (column < N)[None, :]
            weights = tl.load(matrix, mask=mask, other=0.0)
            acc = tl.dot(x, weights, acc, input_precision="ieee")
            xs += INNER
            matrix += INNER * N
        out = out_ptr + (first + row).to(tl.int64)[:, None] * N + column[None, :]
        mask = (row < count)[:, None] & (column < N)[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def unpack(words, scales, dtype: tl.constexpr):
    """The four weights in each word [n, k], times their scales, over 2**63.

    Scales are exponents plus 127, [n, k]. Exact from 2**-68 to 2**63; in float16 rounded.
    """
    if dtype == tl.bfloat16:
        # An exponent of bfloat16 is one plus 127 too.
        factors = (tl.minimum(scales.to(tl.int32) + 63, 255) << 7).to(tl.int16)
        return tl.inline_asm_elementwise(
            _UNPACK,
            "=r,=r,=r,=r,r,r",
            [words, factors],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    power = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return (
        unpack_one(words, power, dtype),
        unpack_one(words >> 4, power, dtype),
        unpack_one(words >> 8, power, dtype),
        unpack_one(words >> 12, power, dtype),
    )


@triton.jit
def unpack_one(code, power, dtype: tl.constexpr):
    """The weight in the low four bits, times a power of two."""
    code = code.to(tl.int32) & 15
    exponent, mantissa = (code >> 1) & 3, code & 1
    doubled = tl.where(exponent == 0, mantissa, ((2 + mantissa) << exponent) >> 1)
    value = doubled.to(tl.float32) * (power / 2)
    return tl.where(code >= 8, -value, value).to(dtype)


@triton.jit
def grouped_mxfp4_kernel(
    x_ptr,  # [M, 4, K / 4]: column 4 * i + j is [:, j, i]
    blocks_ptr,  # [GROUPS, N, K / 2]
    scales_ptr,  # [GROUPS, N, K / 32]
    sizes_ptr,  # [GROUPS]
    out_ptr,  # [M, N]
    K: tl.constexpr,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """The same of packed matrices, which become numbers on their way into the product.

    Words of four weights are read: each of the four makes a product of its own with every fourth
    column of x.
    """
    group, first, count = find_rows(sizes_ptr, tl.program_id(1), GROUPS, ROWS)
    if count > 0:
        WORDS: tl.constexpr = INNER // 4
        PART: tl.constexpr = K // 4
        row = tl.arange(0, ROWS)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        word, scale = tl.arange(0, WORDS), tl.arange(0, WORDS // 8)
        xs = x_ptr + (first + row).to(tl.int64)[None, :] * K + word[:, None]
        output = group.to(tl.int64) * N + column[:, None]
        words_ptr = blocks_ptr.to(tl.pointer_type(tl.uint16), bitcast=True)
        words_ptr = words_ptr + output * (K // 4) + word[None, :]
        powers_ptr = scales_ptr + output * (K // 32) + scale[None, :]
        columns = (column < N)[:, None]
        acc = tl.zeros((COLUMNS, ROWS), tl.float32)
        for start in range(0, K // 4, WORDS):
            in_matrix = word < K // 4 - start
            words = tl.load(words_ptr, mask=columns & in_matrix[None, :], other=0)
            in_scales = scale < K // 32 - start // 8
            scales = tl.load(powers_ptr, mask=columns & in_scales[None, :], other=127)
            scales = tl.broadcast_to(scales[:, :, None], (COLUMNS, WORDS // 8, 8))
            scales = tl.reshape(scales, (COLUMNS, WORDS))
            w0, w1, w2, w3 = unpack(words, scales, x_ptr.dtype.element_ty)
            mask = in_matrix[:, None] & (row < count)[None, :]
            x = tl.load(xs, mask=mask, other=0.0)
            acc = tl.dot(w0, x, acc, input_precision="ieee")
            x = tl.load(xs + PART, mask=mask, other=0.0)
            acc = tl.dot(w1, x, acc, input_precision="ieee")
            x = tl.load(xs + 2 * PART, mask=mask, other=0.0)
            acc = tl.dot(w2, x, acc, input_precision="ieee")
            x = tl.load(xs + 3 * PART, mask=mask, other=0.0)
            acc = tl.dot(w3, x, acc, input_precision="ieee")
            xs += WORDS
            words_ptr += WORDS
            powers_ptr += WORDS // 8
        if x_ptr.dtype.element_ty == tl.bfloat16:
            acc *= _LEFT
        out = out_ptr + (first + row).to(tl.int64)[None, :] * N + column[:, None]
        mask = columns & (row < count)[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)
