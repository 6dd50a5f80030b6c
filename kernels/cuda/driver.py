"""CUDA C++ compiled by NVRTC and launched on torch's stream. Knows no kernel; needs a CUDA build of torch to launch."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import multiprocessing
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from kernels.cuda import cubins
from kernels.errors import KernelError

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_KINDS = {1: 0, 2: 9}  # by bytes of an element: CU_TENSOR_MAP_DATA_TYPE_UINT8, _BFLOAT16
_SWIZZLE_128, _PROMOTE_256 = 3, 3  # CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_NVRTC_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
_NVRTC_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")

_Key: TypeAlias = tuple[Path, str, tuple[tuple[str, int], ...]]
_compiled: dict[_Key, tuple[bytes, str]] = {}  # by `compile_ahead`


@dataclass(frozen=True, slots=True)
class Kernel:
    """A loaded kernel: `handle` is the driver's, `shared_bytes` and `threads` belong to every launch."""

    handle: ctypes.c_void_p
    threads: int
    shared_bytes: int

    def launch(self, grid: tuple[int, int, int], parameters: ctypes.Structure) -> None:
        """Queue one launch on torch's current stream; allocates nothing on the device. Raises KernelError."""
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = _cuda().cuLaunchKernel(
            self.handle, *grid, self.threads, 1, 1, self.shared_bytes, stream, arguments, None
        )  # fmt: skip
        _expect(code, "launching a kernel")

    def launch_beside(self, grid: tuple[int, int, int], parameters: ctypes.Structure) -> None:
        """The same, but its blocks may start before the launch before it has ended, and must wait for that themselves.

        Saves the time between both; for kernels that begin with `await_launch_before`. Raises KernelError.
        """
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        attribute = _Attribute(_PROGRAMMATIC_SERIALIZATION, 0, 1)
        shape = (*grid, self.threads, 1, 1, self.shared_bytes)
        stream = torch.cuda.current_stream().cuda_stream
        launch = _Launch(shape, stream, ctypes.addressof(attribute), 1)
        _expect(_cuda().cuLaunchKernelEx(ctypes.byref(launch), self.handle, arguments, None), "launching a kernel")


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Launch(ctypes.Structure):  # CUlaunchConfig
    _fields_ = [("shape", ctypes.c_uint * 7), ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p),
                ("count", ctypes.c_uint)]  # fmt: skip


def tensor_map(tensor: Tensor, box: tuple[int, int, int]) -> bytes:
    """What a kernel needs to copy boxes of a bf16 or byte-wide tensor of three dimensions: 128 bytes for a `TensorMap`.

    `box` is in the tensor's order and its innermost extent 128 bytes, laid down with the 128-byte swizzle; beyond the
    tensor's ends there are zeros. Raises KernelError where strides or address are no multiples of 16 bytes.
    """
    found = ctypes.create_string_buffer(128 + 64)
    place = -(-ctypes.addressof(found) // 64) * 64
    sizes = (ctypes.c_uint64 * 3)(*reversed(tensor.shape))
    width = tensor.element_size()
    strides = (ctypes.c_uint64 * 2)(tensor.stride(1) * width, tensor.stride(0) * width)
    extents, steps = (ctypes.c_uint32 * 3)(*reversed(box)), (ctypes.c_uint32 * 3)(1, 1, 1)
    code = _cuda().cuTensorMapEncodeTiled(
        ctypes.c_void_p(place), _KINDS[width], 3, ctypes.c_void_p(tensor.data_ptr()), sizes, strides, extents, steps,
        0, _SWIZZLE_128, _PROMOTE_256, 0,
    )  # fmt: skip
    _expect(code, f"describing a tensor of {list(tensor.shape)}")
    return ctypes.string_at(place, 128)


def load(cubin: bytes, name: str, threads: int, shared_bytes: int) -> Kernel:
    """The kernel called `name` of a cubin, in the current device's context. Raises KernelError."""
    torch.cuda.current_stream()  # makes torch's context current
    module, handle = ctypes.c_void_p(), ctypes.c_void_p()
    _expect(_cuda().cuModuleLoadData(ctypes.byref(module), cubin), "loading a cubin")
    _expect(_cuda().cuModuleGetFunction(ctypes.byref(handle), module, name.encode()), f"looking for {name}")
    code = _cuda().cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED, shared_bytes)
    _expect(code, f"asking for {shared_bytes} bytes of shared memory")
    return Kernel(handle, threads, shared_bytes)


def compile_ahead(sources: Iterable[tuple[Path, str, Mapping[str, int]]], processes: int) -> dict[str, str]:
    """Compile many (source, architecture, defines) side by side; `compile_cubin` then finds them done.

    To be called before CUDA is used: processes are forked. Returns the reports by source and defines.

    Raises KernelError as `compile_cubin` does.
    """
    wanted = [(source, architecture, tuple(sorted(defines.items()))) for source, architecture, defines in sources]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        done = pool.map(_compile, wanted)
        _compiled.update(zip(wanted, done, strict=True))
    return {f"{key[0].stem} {dict(key[2])}": _compiled[key][1] for key in wanted}


def compile_cubin(source: Path, architecture: str, defines: Mapping[str, int]) -> tuple[bytes, str]:
    """Machine code for `architecture` (sm_90a) and the compiler's log with registers and spills. Needs no GPU.

    `source` may include what lies beside it.

    Raises KernelError with the compiler's words where the source does not compile.
    """
    key = (source, architecture, tuple(sorted(defines.items())))
    return _compiled.get(key) or _compile(key)


def _compile(key: _Key) -> tuple[bytes, str]:
    """From the folder of compiled kernels, or by the compiler and into it."""
    source, architecture, defines = key
    options = [f"--gpu-architecture={architecture}", "--std=c++17", "--ptxas-options=-v"]
    options += [f"-D{name}={value}" for name, value in defines]
    place = cubins.place_of(source, options, _compiler())
    found = cubins.read(place)
    if found is None:
        found = _compiled_anew(source, [*options, f"-I{source.parent}"])
        cubins.write(place, *found)
    return found


def _compiler() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _expect(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "asking for the compiler's version")
    return f"NVRTC {major.value}.{minor.value}"


def _compiled_anew(source: Path, options: list[str]) -> tuple[bytes, str]:
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    code = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), b"kernel.cu", 0, None, None)
    _expect(code, "starting the compiler")
    try:
        code = nvrtc.nvrtcCompileProgram(program, len(options), given)
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace")
        if code:
            raise KernelError(f"NVRTC refuses the source: {log}", fix="use the CUDA version that the docs name")
        return _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log.strip("\0\n ")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def has_nvrtc() -> bool:
    """Whether CUDA C++ can be compiled here."""
    try:
        _nvrtc()
    except KernelError:
        return False
    return True


def _text(size_of: ctypes._CFuncPtr, read: ctypes._CFuncPtr, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _expect(size_of(program, ctypes.byref(size)), "reading the compiler's output")
    found = ctypes.create_string_buffer(size.value)
    _expect(read(program, found), "reading the compiler's output")
    return found.raw


@functools.cache
def _cuda() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KernelError(f"no CUDA driver: {error}", fix="run on a machine with an NVIDIA GPU") from error


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    for place in (*_NVRTC_NAMES, *_packaged()):
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise KernelError("NVRTC is not installed", fix="pip install nvidia-cuda-nvrtc, or a CUDA build of torch")


def _packaged() -> list[str]:
    """Where wheels put NVRTC."""
    found: list[str] = []
    for package in _NVRTC_PACKAGES:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        places = [file for file in files if file.name.startswith("libnvrtc.so")]
        found += [str(Path(str(file.locate()))) for file in places]
    return found


def _expect(code: int, doing: str) -> None:
    if code:
        raise KernelError(f"CUDA error {code} while {doing}", fix="see the CUDA driver's list of result codes")
