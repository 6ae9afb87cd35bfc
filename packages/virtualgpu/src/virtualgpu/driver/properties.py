"""The properties of a virtual GPU, and the versions of CUDA and cuDNN that it answers with."""

import hashlib
import uuid
from dataclasses import dataclass

from virtualgpu.profiles import Profile

MIB = 1 << 20
# The versions of the recordings that the virtual GPU is compared with.
CUDA_VERSION, CUDNN_VERSION = "13.0", 91900


@dataclass(frozen=True)
class DeviceProperties:
    """The properties of a virtual GPU, as `torch.cuda.get_device_properties` returns them.

    Sizes are in bytes, clocks in kHz.
    """

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    L2_cache_size: int
    max_threads_per_multi_processor: int
    regs_per_multiprocessor: int
    shared_memory_per_block: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    warp_size: int
    clock_rate: int
    memory_clock_rate: int
    memory_bus_width: int
    uuid: uuid.UUID
    pci_bus_id: int
    gcnArchName: str  # noqa: N815 (torch's name; on NVIDIA's GPUs it is the model's)
    max_threads_per_block: int = 1024
    pci_device_id: int = 0
    pci_domain_id: int = 0
    is_integrated: int = 0
    is_multi_gpu_board: int = 0

    def __repr__(self) -> str:
        """Return the properties in one line, in the format of PyTorch."""
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // MIB}MB, "
            f"multi_processor_count={self.multi_processor_count}, uuid={self.uuid}, "
            f"pci_bus_id={self.pci_bus_id}, pci_device_id={self.pci_device_id}, "
            f"pci_domain_id={self.pci_domain_id}, L2_cache_size={self.L2_cache_size // MIB}MB)"
        )


def properties(profile: Profile, total_memory: int, index: int) -> DeviceProperties:
    """Return the properties of a GPU with this model, memory in bytes, and index."""
    return DeviceProperties(
        name=profile.name,
        major=profile.major,
        minor=profile.minor,
        total_memory=total_memory,
        multi_processor_count=profile.multiprocessors,
        L2_cache_size=profile.l2_bytes,
        max_threads_per_multi_processor=profile.max_threads_per_multiprocessor,
        regs_per_multiprocessor=profile.registers_per_multiprocessor,
        shared_memory_per_block=profile.shared_memory_per_block_bytes,
        shared_memory_per_block_optin=profile.shared_memory_per_block_optin_bytes,
        shared_memory_per_multiprocessor=profile.shared_memory_per_multiprocessor_bytes,
        warp_size=profile.warp_size,
        clock_rate=profile.sm_clock_khz,
        memory_clock_rate=profile.memory_clock_khz,
        memory_bus_width=profile.memory_bus_bits,
        uuid=uuid.UUID(bytes=hashlib.md5(f"virtual {profile.name} {index}".encode()).digest()),
        pci_bus_id=index + 1,
        gcnArchName=profile.name,
    )
