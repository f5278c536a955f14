"""Runs the ops' Triton kernels on the CPU, in Triton's interpreter, inside JAX programs.

Importing this skips the importing test module where there is no Triton, or a GPU that needs the
kernels compiled. It must come before Triton, which reads the variable below when it defines a
function. The interpreter has no bfloat16 products: test with float16.
"""

import os

import jax
import numpy as np
import pytest

if jax.default_backend() == "gpu":
    pytest.skip("a GPU runs the kernels themselves", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
interpreter = pytest.importorskip("triton.runtime.interpreter")

patch_tensor = interpreter._patch_lang_tensor


def patch_tensor_for_numpy_2(tensor, scope):
    """Triton 3.6 takes int(x) of arrays of one element, which NumPy has deprecated."""
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = patch_tensor_for_numpy_2


class HostTensor:
    """A NumPy array under the part of PyTorch's interface by which the interpreter reads one."""

    def __init__(self, array):
        self.array = array

    @property
    def dtype(self):
        return self.array.dtype

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *shape, device):
        return HostTensor(self.array)

    def set_(self, *storage):
        pass

    def copy_(self, other):
        pass

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return self.array.strides


def launch(kernel, inputs, outputs, grid, *, num_warps, num_stages, **constants):
    """In place of `pallas_kernels.triton_calls.launch`; what a kernel leaves unwritten is NaN."""

    def interpret(*arrays):
        arrays = [np.ascontiguousarray(x) for x in arrays]
        written = []
        for output in outputs:
            unwritten = np.nan if np.issubdtype(output.dtype, np.floating) else -(2**31)
            written.append(np.full(output.shape, unwritten, output.dtype))
        tensors = map(HostTensor, (*arrays, *written))
        kernel[grid](*tensors, **constants)
        return written

    return jax.pure_callback(interpret, list(outputs), *inputs)
