"""What is known of a node's GPUs, and what is wrong with them: evidence as fields, and a sentence for people.

Pure. A probe reads NVML while the GPU computes, and measures a matrix product and a copy; here that is compared with
what the driver says the GPU can do, and with its maker's data sheet.

    problem               found by                                               the node is
    lost, needs a reset   what NVML raises                                       faulty
    memory errors         uncorrected ones, and repairs that failed or wait      faulty; a note once they are repaired
    heat, power           the driver holds the clocks down                       slow
    PCIe width, NVLink    narrower, or fewer links, than it can have             slow
    product, memory       under a share of the data sheet                        slow
    clocks set, PCIe generation, no data sheet, nothing read                     as healthy as it is otherwise: a note

The shares are judgement, with room for clocks that follow the power limit; nothing was measured for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

from oobleck.planner import DeviceSheet, sheet_of_product

from .rounds import Health, NodeVerdict

_LEAST_PRODUCT = 0.5
"""Of the data sheet's rate of matrix products in bfloat16."""
_LEAST_MEMORY = 0.65
"""Of the data sheet's rate of memory."""


class NvmlState(StrEnum):
    """Whether NVML could be asked about a GPU."""

    READ = "read"
    NO_MODULE = "no module"
    """pynvml is not installed there."""
    NO_DRIVER = "no driver"
    """Its library is not there, or the driver is not loaded."""
    LOST = "lost"
    RESET_NEEDED = "reset needed"
    REFUSED = "refused"
    """Anything else: `error` says what."""


class GpuReading(StrEnum):
    """What may be read of a GPU; what one does not have cannot be."""

    CLOCKS = "clocks"
    CLOCK_LIMITS = "clock limits"
    ECC = "ECC counters"
    REPAIRS = "memory repairs"
    PCIE = "PCIe link"
    NVLINK = "NVLink"


class ClockLimit(StrEnum):
    """What holds a GPU's clocks down, as NVML counts it (`nvmlClocksEventReasons`)."""

    IDLE = "idle"
    APPLICATION = "application clocks"
    POWER_CAP = "power cap"
    HARDWARE = "hardware slowdown"
    SYNC_BOOST = "sync boost"
    HEAT = "heat"
    HARDWARE_HEAT = "heat, by the hardware"
    POWER_BRAKE = "power brake"
    DISPLAY = "display clocks"


_HEAT = frozenset({ClockLimit.HEAT, ClockLimit.HARDWARE_HEAT})
_POWER = frozenset({ClockLimit.HARDWARE, ClockLimit.POWER_BRAKE})
_SET = frozenset({ClockLimit.APPLICATION, ClockLimit.SYNC_BOOST, ClockLimit.DISPLAY})


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """A GPU as it was found while it computed. None is what could not be read or measured."""

    index: int
    name: str
    nvml: NvmlState
    error: str = ""
    """NVML's own words, where it refused."""
    unread: tuple[GpuReading, ...] = ()
    """What this GPU, its driver or its machine does not tell."""
    sm_mhz: int | None = None
    max_sm_mhz: int | None = None
    clock_limits: tuple[ClockLimit, ...] = ()
    corrected: int | None = None
    """Memory errors that ECC has corrected since the driver was loaded."""
    uncorrected: int | None = None
    repair_waits: bool | None = None
    """Whether bad memory will be replaced by spare memory when the GPU is reset."""
    repair_failed: bool | None = None
    """Whether there was no spare memory left for that."""
    pcie_width: int | None = None
    max_pcie_width: int | None = None
    pcie_generation: int | None = None
    max_pcie_generation: int | None = None
    num_nvlinks: int | None = None
    num_nvlinks_up: int | None = None
    product_flops: float | None = None
    """Measured, in bfloat16, per second."""
    memory_bytes_per_s: float | None = None
    """Measured: read and written by a copy."""


class GpuProblem(StrEnum):
    LOST = "lost"
    RESET_NEEDED = "reset needed"
    MEMORY_ERRORS = "memory errors"
    MEMORY_REPAIRED = "memory repaired"
    REPAIR_FAILED = "memory repair failed"
    HOT = "hot"
    POWER = "power"
    CLOCKS_SET = "clocks set"
    PCIE_WIDTH = "PCIe width"
    PCIE_GENERATION = "PCIe generation"
    NVLINK = "NVLink"
    SLOW_PRODUCT = "slow product"
    SLOW_MEMORY = "slow memory"
    NO_SHEET = "no data sheet"
    NOT_READ = "not read"


_HEALTH: Mapping[GpuProblem, Health] = {
    GpuProblem.LOST: Health.FAULTY,
    GpuProblem.RESET_NEEDED: Health.FAULTY,
    GpuProblem.MEMORY_ERRORS: Health.FAULTY,
    GpuProblem.MEMORY_REPAIRED: Health.HEALTHY,
    GpuProblem.REPAIR_FAILED: Health.FAULTY,
    GpuProblem.HOT: Health.SLOW,
    GpuProblem.POWER: Health.SLOW,
    GpuProblem.CLOCKS_SET: Health.HEALTHY,
    GpuProblem.PCIE_WIDTH: Health.SLOW,
    GpuProblem.PCIE_GENERATION: Health.HEALTHY,
    GpuProblem.NVLINK: Health.SLOW,
    GpuProblem.SLOW_PRODUCT: Health.SLOW,
    GpuProblem.SLOW_MEMORY: Health.SLOW,
    GpuProblem.NO_SHEET: Health.HEALTHY,
    GpuProblem.NOT_READ: Health.HEALTHY,
}


_UNREAD = {NvmlState.LOST: GpuProblem.LOST, NvmlState.RESET_NEEDED: GpuProblem.RESET_NEEDED}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFinding:
    """Something about a GPU that is worth knowing."""

    gpu: int
    problem: GpuProblem
    health: Health
    """What it makes of the node; healthy for a note."""
    found: float | None = None
    """Lanes, links, errors, a generation, MHz, or a rate per second."""
    expected: float | None = None
    limits: tuple[ClockLimit, ...] = ()
    """What held the clocks down when it was found."""
    nvml: NvmlState = NvmlState.READ
    error: str = ""
    name: str = ""
    """The GPU's, where it is what matters."""


def findings_about(gpus: Iterable[GpuFacts]) -> tuple[GpuFinding, ...]:
    """Return what is wrong with GPUs, or worth a note; the gravest first."""
    found = [
        finding
        for facts in gpus
        for finding in (*_from_driver(facts), *_from_measures(facts, sheet_of_product(facts.name)))
    ]
    grave = (Health.FAULTY, Health.SLOW, Health.HEALTHY)
    return tuple(sorted(found, key=lambda finding: grave.index(finding.health)))


def fault_of(findings: Sequence[GpuFinding]) -> str:
    """Return why a node cannot compute with its GPUs; nothing where it can."""
    return next(iter(sentences_of(each for each in findings if each.health is Health.FAULTY)), "")


def slowed_by(verdict: NodeVerdict, findings: Sequence[GpuFinding]) -> NodeVerdict:
    """Return a node's verdict with what its GPUs add: one that did as well as the others may be slow all the same."""
    if verdict.health is not Health.HEALTHY:
        return verdict
    slow = sentences_of(each for each in findings if each.health is Health.SLOW)
    return replace(verdict, health=Health.SLOW, reason=slow[0]) if slow else verdict


# --- what is found ---------------------------------------------------------------------------------------------------


def _from_driver(facts: GpuFacts) -> Iterator[GpuFinding]:
    def finding(problem: GpuProblem, found: float | None = None, expected: float | None = None) -> GpuFinding:
        return GpuFinding(
            gpu=facts.index,
            problem=problem,
            health=_HEALTH[problem],
            found=found,
            expected=expected,
            limits=facts.clock_limits,
            nvml=facts.nvml,
            error=facts.error,
        )

    if facts.nvml is not NvmlState.READ:
        yield finding(_UNREAD.get(facts.nvml, GpuProblem.NOT_READ))
        return
    limits = frozenset(facts.clock_limits)
    if facts.repair_failed:
        yield finding(GpuProblem.REPAIR_FAILED)
    if facts.uncorrected or facts.repair_waits:
        is_repaired = facts.repair_waits is False and not facts.repair_failed
        yield finding(GpuProblem.MEMORY_REPAIRED if is_repaired else GpuProblem.MEMORY_ERRORS, facts.uncorrected)
    if limits & _HEAT:
        yield finding(GpuProblem.HOT, facts.sm_mhz, facts.max_sm_mhz)
    if limits & _POWER and not limits & _HEAT:  # the hardware slows down for heat too, and says both
        yield finding(GpuProblem.POWER, facts.sm_mhz, facts.max_sm_mhz)
    if limits & _SET:
        yield finding(GpuProblem.CLOCKS_SET, facts.sm_mhz, facts.max_sm_mhz)
    if _is_less(facts.pcie_width, facts.max_pcie_width):
        yield finding(GpuProblem.PCIE_WIDTH, facts.pcie_width, facts.max_pcie_width)
    if _is_less(facts.pcie_generation, facts.max_pcie_generation):
        yield finding(GpuProblem.PCIE_GENERATION, facts.pcie_generation, facts.max_pcie_generation)
    if facts.num_nvlinks_up and _is_less(facts.num_nvlinks_up, facts.num_nvlinks):  # none: it has no bridge
        yield finding(GpuProblem.NVLINK, facts.num_nvlinks_up, facts.num_nvlinks)


def _from_measures(facts: GpuFacts, sheet: DeviceSheet | None) -> Iterator[GpuFinding]:
    if sheet is None:
        problem = GpuProblem.NO_SHEET
        yield GpuFinding(gpu=facts.index, problem=problem, health=_HEALTH[problem], name=facts.name)
        return
    for problem, measured, rate, least in (
        (GpuProblem.SLOW_PRODUCT, facts.product_flops, sheet.bfloat16_flops, _LEAST_PRODUCT),
        (GpuProblem.SLOW_MEMORY, facts.memory_bytes_per_s, sheet.memory_bytes_per_s, _LEAST_MEMORY),
    ):
        if measured is not None and measured < least * rate:
            yield GpuFinding(
                gpu=facts.index,
                problem=problem,
                health=_HEALTH[problem],
                found=measured,
                expected=rate,
                limits=facts.clock_limits,
                nvml=facts.nvml,
            )


def _is_less(found: int | None, expected: int | None) -> bool:
    return found is not None and expected is not None and found < expected


_RESET = "`nvidia-smi -r` resets it while nothing uses it, a restart of the node as well"


# --- sentences -------------------------------------------------------------------------------------------------------


def sentences_of(findings: Iterable[GpuFinding]) -> tuple[str, ...]:
    """Say what was found, and what to do about it; once for all GPUs of which the same is to be said."""
    gpus: dict[str, list[int]] = {}
    for finding in findings:
        gpus.setdefault(_words(finding), []).append(finding.gpu)
    return tuple(f"GPU {', '.join(map(str, numbers))}: {words}" for words, numbers in gpus.items())


def _words(finding: GpuFinding) -> str:
    found, expected = finding.found or 0.0, finding.expected or 0.0
    match finding.problem:
        case GpuProblem.LOST:
            return "the driver has lost it; look for Xid 79 in `dmesg -T`, and restart the node"
        case GpuProblem.RESET_NEEDED:
            return f"the driver asks for a reset; {_RESET}"
        case GpuProblem.MEMORY_ERRORS:
            return f"{found:.0f} memory errors that ECC could not correct, and memory that is to be replaced; {_RESET}"
        case GpuProblem.MEMORY_REPAIRED:
            return f"{found:.0f} memory errors that ECC could not correct; the memory is replaced by spare memory"
        case GpuProblem.REPAIR_FAILED:
            return "no spare memory is left to replace what is broken; have the GPU replaced"
        case GpuProblem.HOT:
            return f"heat holds it down{_clocks(finding)}; look at its cooling"
        case GpuProblem.POWER:
            return f"its power supply holds it down{_clocks(finding)}; look at the node's power"
        case GpuProblem.CLOCKS_SET:
            return f"its clocks are set lower than they could be{_clocks(finding)}; `nvidia-smi -rac` takes that back"
        case GpuProblem.PCIE_WIDTH:
            return f"it has {found:.0f} of {expected:.0f} PCIe lanes; seat the card again, or look at the riser"
        case GpuProblem.PCIE_GENERATION:
            return f"its PCIe link is of generation {found:.0f}, and could be of {expected:.0f}"
        case GpuProblem.NVLINK:
            return f"{found:.0f} of {expected:.0f} NVLinks are up; look at `nvidia-smi nvlink -s`"
        case GpuProblem.SLOW_PRODUCT:
            return _share(finding, "matrix products in bfloat16", 1e12, "TFLOP/s")
        case GpuProblem.SLOW_MEMORY:
            return _share(finding, "copies of its memory", 1e9, "GB/s")
        case GpuProblem.NO_SHEET:
            return f"no data sheet of {finding.name} is known here; it was compared with those of other nodes alone"
        case GpuProblem.NOT_READ:
            return _not_read(finding)
        case _:
            assert_never(finding.problem)


def _clocks(finding: GpuFinding) -> str:
    return f" ({finding.found:.0f} of {finding.expected:.0f} MHz)" if finding.found and finding.expected else ""


def _share(finding: GpuFinding, what: str, unit: float, name: str) -> str:
    found, expected = finding.found or 0.0, finding.expected or 1.0
    held = f"; what holds its clocks down: {', '.join(finding.limits)}" if finding.limits else ""
    return f"{what} at {found / unit:.0f} {name}, {found / expected:.0%} of its data sheet{held}"


def _not_read(finding: GpuFinding) -> str:
    what = "clocks, memory errors and links were not read"
    match finding.nvml:
        case NvmlState.NO_MODULE:
            return f"its {what}: install oobleck[gpu] (nvidia-ml-py) there"
        case NvmlState.NO_DRIVER:
            return f"its {what}: NVML's library, or the driver, is not there"
        case _:
            return f"its {what}: NVML says {finding.error!r}"
