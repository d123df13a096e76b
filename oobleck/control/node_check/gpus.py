"""What is known of a node's GPUs, and what is wrong with them: evidence as fields, and sentences for people. Pure.

A probe reads NVML while the GPU computes, and measures a matrix product and a copy. This module compares the results
with the GPU's abilities by its driver, and with its maker's data sheet.

    problem               found by                                               the node is
    lost, needs a reset   errors that NVML raises                                faulty
    memory errors         uncorrected ones, and failed or pending repairs        faulty; a note once they are repaired
    heat, power           the driver holds the clocks down                       slow
    PCIe width, NVLink    narrower, or fewer links, than it can have             slow
    product, memory       under a share of the data sheet                        slow
    clocks set, PCIe generation, no data sheet, nothing read                     as healthy as it is otherwise: a note

"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from oobleck.planner import DeviceSheet, sheet_of_product

from .rounds import Health, NodeVerdict

# The shares are judgement, not measured, with room for clocks that follow the power limit.
_LEAST_PRODUCT = 0.5
"""The least share of the data sheet's rate of matrix products in bfloat16."""
_LEAST_MEMORY = 0.65
"""The least share of the data sheet's rate of memory."""


class NvmlState(StrEnum):
    """Whether NVML answered about a GPU."""

    READ = "read"
    NO_MODULE = "no module"
    """pynvml is not installed."""
    NO_DRIVER = "no driver"
    """NVML's library is missing, or the driver is not loaded."""
    LOST = "lost"
    RESET_NEEDED = "reset needed"
    REFUSED = "refused"
    """Any other error, which is in `error`."""


class GpuReading(StrEnum):
    """What can be read of a GPU, if it has it."""

    CLOCKS = "clocks"
    CLOCK_LIMITS = "clock limits"
    ECC = "ECC counters"
    REPAIRS = "memory repairs"
    PCIE = "PCIe link"
    NVLINK = "NVLink"


class ClockLimit(StrEnum):
    """What limits a GPU's clocks, as NVML reports it (`nvmlClocksEventReasons`)."""

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
    """A GPU while it computed. Values that could not be read or measured are None."""

    index: int
    name: str
    nvml: NvmlState
    error: str = ""
    """NVML's own message, if it refused."""
    unread: tuple[GpuReading, ...] = ()
    """What this GPU, its driver or its machine does not report."""
    sm_mhz: int | None = None
    max_sm_mhz: int | None = None
    clock_limits: tuple[ClockLimit, ...] = ()
    corrected: int | None = None
    """Memory errors that ECC corrected since the driver was loaded."""
    uncorrected: int | None = None
    repair_waits: bool | None = None
    """Whether a reset of the GPU will replace bad memory by spare memory."""
    repair_failed: bool | None = None
    """Whether no spare memory was left for that."""
    pcie_width: int | None = None
    max_pcie_width: int | None = None
    pcie_generation: int | None = None
    max_pcie_generation: int | None = None
    num_nvlinks: int | None = None
    num_nvlinks_up: int | None = None
    product_flops: float | None = None
    """Measured rate in bfloat16, per second."""
    memory_bytes_per_s: float | None = None
    """Measured: bytes read and written by a copy."""


_RESET = "`nvidia-smi -r` resets it while nothing uses it, a restart of the node as well"
_UNCORRECTED = f"{{found:.0f}} memory errors that ECC could not correct, and memory to be replaced; {_RESET}"
_CLOCKS_SET = "its clocks are set lower than they could be{clocks}; `nvidia-smi -rac` takes that back"
_NO_SHEET = "no data sheet of {name} is known here; it was compared with those of other nodes alone"
_REPAIRED = "{found:.0f} memory errors that ECC could not correct; the memory is replaced by spare memory"


class GpuProblem(StrEnum):
    """A possible finding about a GPU: the node's health for it, healthy for a note, and its words."""

    health: Health
    template: str

    def __new__(cls, value: str, health: Health, template: str) -> GpuProblem:
        member = str.__new__(cls, value)
        member._value_, member.health, member.template = value, health, template
        return member

    LOST = "lost", Health.FAULTY, "the driver has lost it; look for Xid 79 in `dmesg -T`, and restart the node"
    RESET_NEEDED = "reset needed", Health.FAULTY, f"the driver asks for a reset; {_RESET}"
    MEMORY_ERRORS = "memory errors", Health.FAULTY, _UNCORRECTED
    MEMORY_REPAIRED = "memory repaired", Health.HEALTHY, _REPAIRED
    REPAIR_FAILED = "memory repair failed", Health.FAULTY, "no spare memory is left for a repair; have the GPU replaced"
    HOT = "hot", Health.SLOW, "heat holds it down{clocks}; look at its cooling"
    POWER = "power", Health.SLOW, "its power supply holds it down{clocks}; look at the node's power"
    CLOCKS_SET = "clocks set", Health.HEALTHY, _CLOCKS_SET
    PCIE_WIDTH = "PCIe width", Health.SLOW, "it has {found:.0f} of {expected:.0f} PCIe lanes; reseat the card or riser"
    PCIE_GENERATION = "PCIe generation", Health.HEALTHY, "its PCIe link is at generation {found:.0f} of {expected:.0f}"
    NVLINK = "NVLink", Health.SLOW, "{found:.0f} of {expected:.0f} NVLinks are up; look at `nvidia-smi nvlink -s`"
    SLOW_PRODUCT = "slow product", Health.SLOW, "matrix products in bfloat16 at {tera:.0f} TFLOP/s, {share}"
    SLOW_MEMORY = "slow memory", Health.SLOW, "copies of its memory at {giga:.0f} GB/s, {share}"
    NO_SHEET = "no data sheet", Health.HEALTHY, _NO_SHEET
    NOT_READ = "not read", Health.HEALTHY, "its clocks, memory errors and links were not read: {unread}"


_UNREAD = {NvmlState.LOST: GpuProblem.LOST, NvmlState.RESET_NEEDED: GpuProblem.RESET_NEEDED}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFinding:
    gpu: int
    problem: GpuProblem
    health: Health
    found: float | None = None
    """Lanes, links, errors, a generation, MHz, or a rate per second."""
    expected: float | None = None
    limits: tuple[ClockLimit, ...] = ()
    """What limited the clocks then."""
    nvml: NvmlState = NvmlState.READ
    error: str = ""
    name: str = ""


def findings_about(gpus: Iterable[GpuFacts]) -> tuple[GpuFinding, ...]:
    """Return what is wrong with GPUs, or worth a note, the gravest first."""
    found = [
        finding
        for facts in gpus
        for finding in (*_from_driver(facts), *_from_measures(facts, sheet_of_product(facts.name)))
    ]
    grave = (Health.FAULTY, Health.SLOW, Health.HEALTHY)
    return tuple(sorted(found, key=lambda finding: grave.index(finding.health)))


def fault_of(findings: Sequence[GpuFinding]) -> str:
    """Return why a node cannot compute with its GPUs; empty if it can."""
    return next(iter(sentences_of(each for each in findings if each.health is Health.FAULTY)), "")


def slowed_by(verdict: NodeVerdict, findings: Sequence[GpuFinding]) -> NodeVerdict:
    """Return a node's verdict, which its GPUs may make slow even if it measured as well as the others."""
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
            health=problem.health,
            found=found,
            expected=expected,
            limits=facts.clock_limits,
            nvml=facts.nvml,
            error=facts.error,
        )

    if facts.nvml is not NvmlState.READ:  # without NVML the other facts are all unknown
        yield finding(_UNREAD.get(facts.nvml, GpuProblem.NOT_READ))
        return
    limits = frozenset(facts.clock_limits)
    if facts.repair_failed:
        yield finding(GpuProblem.REPAIR_FAILED)
    if facts.uncorrected or facts.repair_waits:
        # Where a GPU does not report its repairs, its memory counts as bad.
        is_repaired = facts.repair_waits is False and not facts.repair_failed
        yield finding(GpuProblem.MEMORY_REPAIRED if is_repaired else GpuProblem.MEMORY_ERRORS, facts.uncorrected)
    if limits & _HEAT:
        yield finding(GpuProblem.HOT, facts.sm_mhz, facts.max_sm_mhz)
    # The hardware also slows down for heat, and then reports both.
    if limits & _POWER and not limits & _HEAT:
        yield finding(GpuProblem.POWER, facts.sm_mhz, facts.max_sm_mhz)
    if limits & _SET:
        yield finding(GpuProblem.CLOCKS_SET, facts.sm_mhz, facts.max_sm_mhz)
    if _is_less(facts.pcie_width, facts.max_pcie_width):
        yield finding(GpuProblem.PCIE_WIDTH, facts.pcie_width, facts.max_pcie_width)
    if _is_less(facts.pcie_generation, facts.max_pcie_generation):
        yield finding(GpuProblem.PCIE_GENERATION, facts.pcie_generation, facts.max_pcie_generation)
    # A GPU that can have links, of which none is up, has no bridge.
    if facts.num_nvlinks_up and _is_less(facts.num_nvlinks_up, facts.num_nvlinks):
        yield finding(GpuProblem.NVLINK, facts.num_nvlinks_up, facts.num_nvlinks)


def _from_measures(facts: GpuFacts, sheet: DeviceSheet | None) -> Iterator[GpuFinding]:
    if sheet is None:
        problem = GpuProblem.NO_SHEET
        yield GpuFinding(gpu=facts.index, problem=problem, health=problem.health, name=facts.name)
        return
    for problem, measured, rate, least in (
        (GpuProblem.SLOW_PRODUCT, facts.product_flops, sheet.bfloat16_flops, _LEAST_PRODUCT),
        (GpuProblem.SLOW_MEMORY, facts.memory_bytes_per_s, sheet.memory_bytes_per_s, _LEAST_MEMORY),
    ):
        if measured is not None and measured < least * rate:
            yield GpuFinding(
                gpu=facts.index,
                problem=problem,
                health=problem.health,
                found=measured,
                expected=rate,
                limits=facts.clock_limits,
                nvml=facts.nvml,
            )


def _is_less(found: int | None, expected: int | None) -> bool:
    return found is not None and expected is not None and found < expected


# --- sentences -------------------------------------------------------------------------------------------------------


def sentences_of(findings: Iterable[GpuFinding]) -> tuple[str, ...]:
    """Return findings as sentences, with what to do about them; one for all GPUs with the same finding."""
    gpus: dict[str, list[int]] = {}
    for finding in findings:
        gpus.setdefault(_words(finding), []).append(finding.gpu)
    return tuple(f"GPU {', '.join(map(str, numbers))}: {words}" for words, numbers in gpus.items())


def _words(finding: GpuFinding) -> str:
    found, expected = finding.found or 0.0, finding.expected or 0.0
    held = f"; what holds its clocks down: {', '.join(finding.limits)}" if finding.limits else ""
    return finding.problem.template.format(
        found=found,
        expected=expected,
        tera=found / 1e12,
        giga=found / 1e9,
        share=f"{found / (expected or 1.0):.0%} of its data sheet{held}",
        clocks=f" ({found:.0f} of {expected:.0f} MHz)" if found and expected else "",
        name=finding.name,
        unread=_UNREAD_BECAUSE.get(finding.nvml, f"NVML says {finding.error!r}"),
    )


_UNREAD_BECAUSE = {
    NvmlState.NO_MODULE: "pip install nvidia-ml-py there",
    NvmlState.NO_DRIVER: "NVML's library, or the driver, is not there",
}
