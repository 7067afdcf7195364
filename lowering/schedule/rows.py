"""One kernel, fusion or copy of a program that was replayed."""

import dataclasses
from collections.abc import Mapping

from rich.table import Table

from lowering import tables
from lowering.schedule.kernel import Region


@dataclasses.dataclass(frozen=True)
class KernelSchedule:
    """One kernel, fusion or copy of a program.

    Attributes:
      name: of the instruction in the optimised program.
      kind: "mosaic" for Pallas kernels; else XLA's opcode, such as "fusion" or "copy"; "program" for what the top-level
        program does itself, which is to wait for copies that it has started.
      source: where it was traced, such as "model.py:12 (loss)"; empty where the compiler does not know.
      operator: of this library, and its operands, such as "softmax(f32[8,128])"; empty if it belongs to none.
      calls: how often it runs.
      cycles: of one call.
      time_us: of all calls, with what copies that run meanwhile cost them.
      share: of the program's time, from 0 to 1.
      dma_bytes: to and from HBM, of one call.
      dma_count: transfers of these.
      stall_cycles: of one call, waiting for DMAs.
      spills: vector registers that one call stores and loads for want of registers.
      slots: the part of the issue slots, or units, of each kind that is used, from 0 to 1.
      bound: what it waits for, "HBM" or "DMA latency", or the kind of unit that is busiest.
      roofline_us: what all calls need at least for their transfers or their matrix products.
      regions: where the time of one call goes.
    """

    name: str
    kind: str
    source: str
    operator: str
    calls: int
    cycles: float
    time_us: float
    share: float
    dma_bytes: int
    dma_count: int
    stall_cycles: float
    spills: int
    slots: Mapping[str, float]
    bound: str
    roofline_us: float
    regions: tuple[Region, ...] = ()

    def table(self) -> Table:
        """Lays out the regions as a `rich` table."""
        table = Table(title=f"{self.name}, {self.cycles:,.0f} cycles {self.source}".strip(), title_justify="left")
        table.add_column("bundles", no_wrap=True)
        table.add_column("line")
        table.add_column("busiest")
        for name in ("trips", "cycles", "share", "stalls", "spills"):
            table.add_column(name, justify="right", no_wrap=True)
        for region in self.regions:
            figures = region.trips, region.cycles, region.stall_cycles, region.spills
            trips, cycles, stalls, spills = (f"{figure:,.0f}" for figure in figures)
            share = f"{region.cycles / self.cycles:.1%}"
            bundles = f"{region.first:#x}-{region.last:#x}"
            table.add_row(bundles, region.source, region.bound, trips, cycles, share, stalls, spills)
        return table

    def __str__(self) -> str:
        return tables.text(self.table())
