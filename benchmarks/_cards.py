"""GPUs as the compiler wants them described, from their makers' data sheets."""

from __future__ import annotations

from typing import NamedTuple


class Card(NamedTuple):
    """One kind of GPU."""

    name: str  # as its driver says it
    compute: tuple[int, int]  # compute capability
    cores: int  # multiprocessors
    fpus: int  # float32 units of each
    clock: float  # GHz
    bandwidth: int  # bytes a second
    memory: int  # bytes
    cache: int  # of the second level, bytes
    shared: int  # memory of a multiprocessor that its programs share, bytes

    @property
    def architecture(self) -> str:
        """What the assembler calls it."""
        major, minor = self.compute
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")

    @property
    def target(self) -> str:
        """The description that XLA reads, a message of type ``GpuTargetConfigProto``."""
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared}
  shared_memory_per_block_optin: {self.shared - 1024}
  threads_per_core_limit: 2048
  core_count: {self.cores}
  fpus_per_core: {self.fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth}
  l2_cache_size: {self.cache}
  clock_rate_ghz: {self.clock}
  device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {self.compute[0]} minor: {self.compute[1]} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{self.name}"
"""


_KB, _MB = 2**10, 2**20

CARDS = {
    "H100": Card("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 3_350 * 10**9, 80 * 10**9, 50 * _MB, 228 * _KB),
    "H200": Card("NVIDIA H200", (9, 0), 132, 128, 1.98, 4_800 * 10**9, 141 * 10**9, 60 * _MB, 228 * _KB),
    "A100": Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 2_039 * 10**9, 80 * 10**9, 40 * _MB, 164 * _KB),
    "B200": Card("NVIDIA B200", (10, 0), 148, 128, 1.965, 8_000 * 10**9, 180 * 10**9, 126 * _MB, 228 * _KB),
}
