"""Data sheet figures of GPUs and networks.

They are in the file hardware.toml in this folder, and in a user's own file of the same format. MFU
(`peak_flops`) and predictions read them only from here. It does not import torch.
"""

import difflib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import check_content, cut, read_toml

HARDWARE_FILE = Path(__file__).with_name("hardware.toml")
# The part of a GPU's memory that its driver keeps: torch shows 79.1 GiB of an "80 GB" H100, and
# 139.8 of a "141 GB" H200.
DRIVER_FRACTION = 0.015
GB = 10**9
Amount = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class GPU(BaseModel):
    """A device. Units are in the names; hardware.toml says what each figure is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=80)
    matches: str = Field("", max_length=80)
    memory_gb: Amount
    memory_gb_s: Amount
    tflops: dict[Literal["bf16", "fp16", "fp8", "tf32", "fp32"], Amount]
    link_gb_s: Amount
    pcie_gb_s: Amount = 32.0
    sms: int = Field(100, gt=0, le=10**6)
    # Of the host, for each of its GPUs: 2 TiB for eight, as in the machines of these chips.
    host_memory_gb: Amount = 256.0
    watts: Amount = 500.0
    power_limit_watts: Amount | None = None
    product_fraction: Fraction = 0.75
    product_source: str = ""
    attention_fractions: tuple[Fraction, Fraction] = (0.35, 0.3)
    source: str = "the user's own table"

    @property
    def memory_bytes(self) -> int:
        """The memory that torch can see."""
        visible = 1 if self.is_cpu else 1 - DRIVER_FRACTION
        return int(self.memory_gb * 2**30 * visible)

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    @property
    def power_factor(self) -> float:
        """The relative speed of its matrix products under `power_limit_watts`.

        Power grows with the cube of the clock.
        """
        limit = self.power_limit_watts or self.watts
        return min(1.0, (limit / self.watts) ** (1 / 3))

    def peak_flops(self, dtype: str) -> float | None:
        """Dense FLOP/s of matrix products; None where the chip has no such arithmetic.

        dtype: "fp32" (without TF32), "tf32", "bf16", "fp16" or "fp8".
        """
        # Tensor cores of these chips run both 16-bit formats at the same speed; older ones have
        # only fp16.
        known = {str(name): rate for name, rate in self.tflops.items()}
        if dtype == "fp16" and dtype not in known:
            dtype = "bf16"
        return known[dtype] * 1e12 if dtype in known else None


class Network(BaseModel):
    """A network between hosts: `ports` for each GPU, or with `per_host` for each host."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=80)
    gb_s: Amount
    ports: int = Field(1, gt=0, le=64)
    per_host: bool = False
    latency_us: Amount = 10.0
    source: str = "the user's own table"

    def host_bytes_per_second(self, gpus_per_host: int) -> float:
        """The bandwidth of all ports of a host, in one direction."""
        cards = 1 if self.per_host else gpus_per_host
        return self.gb_s * GB * self.ports * cards


EntryT = TypeVar("EntryT", GPU, Network)


class Hardware(BaseModel):
    """The content of a hardware file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpus: tuple[GPU, ...] = ()
    networks: tuple[Network, ...] = ()

    def gpu(self, name: str) -> GPU:
        """The GPU of a name, or of what torch calls it, such as H100.

        Raises UserError with the nearest names.
        """
        for gpu in self.gpus:
            if name and gpu.matches.lower() == name.lower():
                return gpu
        return _by_name(self.gpus, name, "--gpu_type", ", or describe it in a file for --hardware")

    def network(self, name: str) -> Network:
        """The network of a name. Raises UserError with the nearest names."""
        return _by_name(self.networks, name, "--network")

    def find(self, device_name: str) -> GPU | None:
        """The GPU that torch.cuda.get_device_name() calls so; None where it is not here."""
        for gpu in self.gpus:
            if gpu.matches and re.search(rf"\b{re.escape(gpu.matches)}\b", device_name):
                return gpu
        return None


def _by_name(entries: Sequence[EntryT], name: str, option: str, way: str = "") -> EntryT:
    known = {each.name: each for each in entries}
    if name.lower() not in known:
        near = difflib.get_close_matches(cut(name).lower(), known, n=3, cutoff=0.3) or known
        raise UserError(f'{option}: no "{cut(name)}"; nearest: {", ".join(near)}{way}')
    return known[name.lower()]


@cache
def data_sheets() -> Hardware:
    """The content of hardware.toml."""
    return Hardware(**read_toml(HARDWARE_FILE))


def read_hardware(path: Path | None) -> Hardware:
    """hardware.toml, where the entries of a user's file have precedence.

    Raises UserError for a file that is not one.
    """
    if path is None:
        return data_sheets()
    try:
        own = check_content(read_toml(path), Hardware, str(path))
    except FileNotFoundError:
        raise UserError(f"--hardware: {path}: no such file") from None
    gpus = tuple(gpu.model_copy(update={"name": gpu.name.lower()}) for gpu in own.gpus)
    networks = tuple(
        network.model_copy(update={"name": network.name.lower()}) for network in own.networks
    )
    return Hardware(
        gpus=_with_own(data_sheets().gpus, gpus),
        networks=_with_own(data_sheets().networks, networks),
    )


def _with_own(entries: tuple[EntryT, ...], own: tuple[EntryT, ...]) -> tuple[EntryT, ...]:
    """The entries, but for those that have the name of one of a user's own, which come first."""
    names = {each.name for each in own}
    return own + tuple(each for each in entries if each.name not in names)


def gpu_peak_flops(name: str, dtype: str) -> float | None:
    """Peak FLOP/s of a GPU by its driver's name for it; None where the hardware file lacks it."""
    gpu = data_sheets().find(name)
    return None if gpu is None else gpu.peak_flops(dtype)
