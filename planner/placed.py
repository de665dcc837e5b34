"""A pack placed on devices at a time, whichever method put it there."""

from typing import NamedTuple

from planner.groups import Solution
from planner.instance import Instance
from planner.pack import Choice


class Placed(NamedTuple):
    """Hold a pack, its devices, and its start; `setup_s` (loading, compiling) comes before its first step."""

    choice: Choice
    devices: tuple[int, ...]
    start_s: float
    setup_s: float

    @property
    def end_s(self) -> float:
        """Return when the pack's last job is scored."""
        return self.start_s + self.setup_s + self.choice.run_s


def place(instance: Instance, solution: Solution) -> list[Placed]:
    """Put groups on devices, larger groups first, so that groups of powers of two never straddle a host."""
    out: list[Placed] = []
    device = 0
    for group in sorted(solution, key=lambda g: (-g.degree, -g.seconds)):
        on = group.on or tuple(range(device, device + group.degree))
        device += group.degree
        clock = instance.free_at(group.on)
        compiled: set[tuple] = set()
        for n, choice in enumerate(group.packs):
            setup = instance.load_seconds(group.degree) if n == 0 else 0.0
            setup += 0.0 if choice.program in compiled else instance.cost.compile_s
            compiled.add(choice.program)
            out.append(Placed(choice, on, clock, setup))
            clock = out[-1].end_s
    return out
