"""A stand-in for the part of CuPy that the GPU device uses, with the signatures of CuPy 14.

Device memory is host memory that only these functions touch. Work on a stream is queued and done at the next
synchronisation, as late as CUDA may do it: a staging buffer that is used again too early, or a copy that was not waited
for, shows. Kernels are Python functions, found by name; a module only has those that its machine code names.
"""

import ctypes
import types

import numpy as np


class CUDARuntimeError(RuntimeError):
    pass


class CUDADriverError(RuntimeError):
    pass


class OutOfMemoryError(MemoryError):
    pass


class Fake:
    """One fake GPU. ``cupy`` is the module to import; log holds what was called; kernels maps names to functions."""

    def __init__(self, *, compute_capability="90", memory=1 << 24):
        self.log, self.kernels, self.memory, self.used = [], {}, memory, 0
        self.fail_next_synchronize = None
        self.attributes = {4: 32, 1: 16, 3: 0, 2: 8, 0: 1024}
        fake = self

        class Memory:
            def __init__(self, size):
                if fake.used + size > fake.memory:
                    raise OutOfMemoryError(f"Out of memory allocating {size:,} bytes")
                fake.used += size
                # aligned as NumPy does it, less than cudaMalloc promises
                self.bytes = np.full(size + 64, 0x11, np.uint8)
                self.size, self.ptr = size, self.bytes.ctypes.data

            def __del__(self):
                if hasattr(self, "size"):
                    fake.used -= self.size

        class Stream:
            def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
                assert non_blocking
                self.ptr, self.queue, self.captured = 77, [], None
                fake.stream = self

            def do(self, work):
                (self.queue if self.captured is None else self.captured).append(work)

            def synchronize(self):
                if self.captured is not None:
                    raise CUDARuntimeError(
                        "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing"
                    )
                queue, self.queue = self.queue, []
                for work in queue:
                    work()
                if fake.fail_next_synchronize:
                    message, fake.fail_next_synchronize = fake.fail_next_synchronize, None
                    raise CUDARuntimeError(message)

            def begin_capture(self, mode=None):
                assert self.captured is None
                self.captured = []

            def end_capture(self):
                captured, self.captured = self.captured, None
                return Graph(captured)

        class Graph:
            def __init__(self, work):
                self.work, self.uploaded = work, False

            def upload(self, stream=None):
                self.uploaded = True

            def launch(self, stream=None):
                assert self.uploaded
                assert stream is fake.stream
                stream.queue.extend(self.work)

        class Module:
            def load(self, cubin):
                assert type(cubin) is bytes
                assert cubin[:4] == b"\x7fELF" or b".version" in cubin
                self.image = cubin
                fake.log.append("load")

            def get_function(self, name):
                if name.encode() not in self.image:
                    raise CUDADriverError("CUDA_ERROR_NOT_FOUND: named symbol not found")
                return Function(name)

        class Function:
            def __init__(self, name):
                self.name, self.ptr = name, 1000 + len(name)

            def __call__(self, grid, block, args, shared_mem=0, stream=None, enable_cooperative_groups=False):
                assert stream is fake.stream
                assert len(grid) == len(block) == 3
                assert isinstance(args, tuple)
                # what CuPy passes by value; a Python number would be widened to eight bytes behind our back
                assert all(isinstance(a, np.generic) for a in args)
                if block[0] * block[1] * block[2] > 1024:
                    raise CUDADriverError("CUDA_ERROR_INVALID_VALUE: invalid argument")
                fake.log.append((self.name, grid, block, shared_mem))
                values = [a.item() for a in args]
                stream.do(lambda: fake.kernels[self.name](*values))

        def copy(dst, src, size, kind, stream):
            assert stream == 77
            assert kind in (1, 2)
            fake.log.append(("copy", size))
            fake.stream.do(lambda: ctypes.memmove(dst, src, size))

        def fill(ptr, value, size, stream):
            fake.stream.do(lambda: ctypes.memset(ptr, value, size))

        runtime = types.SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            memcpyHostToDevice=1, memcpyDeviceToHost=2, memcpyAsync=copy, memsetAsync=fill,
            getDeviceCount=lambda: 1, getDevice=lambda: 0, driverGetVersion=lambda: 13010,
            getDeviceProperties=lambda device: {"name": b"Fake H200"},
        )  # fmt: skip
        driver = types.SimpleNamespace(
            CUDADriverError=CUDADriverError,
            funcGetAttribute=lambda attribute, function: fake.attributes[attribute],
            funcSetAttribute=lambda function, attribute, value: fake.log.append(("set", attribute, value)),
            CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK=0, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES=1,
            CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES=2, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES=3, CU_FUNC_ATTRIBUTE_NUM_REGS=4,
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
        )  # fmt: skip
        self.cupy = types.ModuleType("cupy")
        self.cupy.cuda = types.SimpleNamespace(
            runtime=runtime,
            driver=driver,
            memory=types.SimpleNamespace(Memory=Memory, OutOfMemoryError=OutOfMemoryError),
            function=types.SimpleNamespace(Module=Module),
            Stream=Stream,
            Device=lambda: types.SimpleNamespace(compute_capability=compute_capability),
            alloc_pinned_memory=Memory,
        )
