"""Quantised weights as they are published: MXFP4 of openai/gpt-oss-20b, FP8 of Qwen/Qwen3-8B-FP8.

MXFP4 (OCP Microscaling Formats 1.0): 32 consecutive values along the input axis share a scale, a
power of two. `*_scales` holds its exponent plus 127 (E8M0), `*_blocks` two E2M1 values a byte, the
earlier one in the low four bits: a sign bit above three bits of magnitude.

FP8: each block of 128 by 128 of a matrix (out, in) shares a scale; blocks at the far edges are cut
off. `*.weight` holds E4M3 values, `*.weight_scale_inv` what they are multiplied by.
"""

import numpy as np
import torch

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
MXFP4_BLOCK = 32
FP8_BLOCK = 128

Tensors = dict[str, torch.Tensor]


def quantize_mxfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """uint8 blocks [..., G, 16] and scales [..., G] of a float32 weight [..., 32 G]."""
    groups = weight.reshape(*weight.shape[:-1], -1, MXFP4_BLOCK)
    largest = np.maximum(np.abs(groups).max(-1), 2.0**-100)
    # In units of its scale the largest value lies in [4, 8), where E2M1 has 4 and 6.
    exponents = np.floor(np.log2(largest)) - 2
    scaled = groups / np.exp2(exponents)[..., None]
    codes = np.abs(np.abs(scaled)[..., None] - E2M1).argmin(-1).astype(np.uint8)
    codes |= np.signbit(scaled).astype(np.uint8) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).astype(np.uint8)


def dequantize_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The float32 weight [..., 32 G] of blocks [..., G, 16] and scales [..., G]."""
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*scales.shape, MXFP4_BLOCK)
    values = np.concatenate([E2M1, -E2M1])[codes]
    values = values * np.exp2(scales.astype(np.float32) - 127)[..., None]
    return values.reshape(*scales.shape[:-1], -1)


def quantize_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 values [out, in] and bfloat16 scales [ceil(out / 128), ceil(in / 128)]."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.unflatten(0, (-1, FP8_BLOCK)).unflatten(-1, (-1, FP8_BLOCK))
    limit = torch.finfo(torch.float8_e4m3fn).max
    scale = (blocks.abs().amax((1, 3)) / limit).to(torch.bfloat16)
    # A scale that was rounded down would put the largest value above the limit, which is NaN.
    values = (weight / spread(scale, weight.shape)).clamp(-limit, limit)
    return values.to(torch.float8_e4m3fn), scale


def dequantize_fp8(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The float32 weight [out, in]."""
    return values.float() * spread(scale, values.shape)


def spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Every block's scale at all of its values, in float32."""
    scale = scale.float().repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return scale[: shape[0], : shape[1]]


def to_mxfp4(tensors: Tensors) -> Tensors:
    """A gpt-oss checkpoint with its experts quantised. Stored unquantised, they are (in, out)."""
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales = quantize_mxfp4(tensor.float().mT.contiguous().numpy())
            stored[f"{name}_blocks"] = torch.from_numpy(blocks)
            stored[f"{name}_scales"] = torch.from_numpy(scales)
        else:
            stored[name] = tensor
    return stored


def to_fp8(tensors: Tensors) -> Tensors:
    """A checkpoint with the projections of its layers quantised."""
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            stored[name], stored[f"{name}_scale_inv"] = quantize_fp8(tensor.float())
        else:
            stored[name] = tensor
    return stored


def dequantize(tensors: Tensors) -> Tensors:
    """The tensors that `to_mxfp4` or `to_fp8` were given, as far as what they stored tells."""
    plain: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("_blocks"):
            name = name.removesuffix("_blocks")
            scales = tensors[f"{name}_scales"].numpy()
            plain[name] = torch.from_numpy(dequantize_mxfp4(tensor.numpy(), scales)).mT
        elif f"{name}_scale_inv" in tensors:
            plain[name] = dequantize_fp8(tensor, tensors[f"{name}_scale_inv"])
        elif not name.endswith(("_scales", "_scale_inv")):
            plain[name] = tensor
    return plain
