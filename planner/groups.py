"""Device groups and whole solutions: a group runs packs one after another; a solution is a list of groups."""

from typing import NamedTuple

from planner.instance import Counts, Instance
from planner.pack import Choice, choose_pack, group_seconds, merge_counts

SPLIT_CLASSES = 8  # a set of more classes is split only where data or batch sizes change


class Place(NamedTuple):
    """Hold a place for a device group: its degree, and where it matters its devices and when the last of them is
    free.
    """

    degree: int
    on: tuple[int, ...] = ()
    start: float = 0.0


class Group(NamedTuple):
    """Hold the packs of one device group of a degree, in order, and when they end; its devices where those are busy
    first.
    """

    degree: int
    packs: tuple[Choice, ...]
    seconds: float
    on: tuple[int, ...] = ()


Solution = list[Group]


def makespan(solution: Solution) -> float:
    """Return the time of the slowest group."""
    return max((group.seconds for group in solution), default=0.0)


def put(group: Group, place: Place) -> Group:
    """Return a group that starts when its place is free."""
    return group._replace(seconds=place.start + group.seconds, on=place.on)


def make_group(
    instance: Instance, degree: int, parts: list[Counts], on: tuple[int, ...] = ()
) -> Group | None:
    """Make a group from the jobs of each of its packs; None where a pack does not fit."""
    packs = [choose_pack(instance, counts, degree) for counts in parts if counts]
    if any(pack is None for pack in packs):
        return None
    chosen = [pack for pack in packs if pack is not None]
    return Group(degree, tuple(chosen), instance.free_at(on) + group_seconds(instance, chosen), on)


def remember(instance: Instance, group: Group) -> None:
    """Keep a group that a search met, where they are kept."""
    if instance.met is None or not group.packs:
        return
    key = (group.degree, merge_counts(*(pack.counts for pack in group.packs)))
    if key not in instance.met or group.seconds < instance.met[key].seconds:
        instance.met[key] = group


def unused(instance: Instance, solution: Solution) -> list[Place]:
    """Return the places of the smallest degree that a solution leaves, those free first; of some devices, where groups
    of two or more are the smallest and devices are busy, none.
    """
    d = instance.degrees[0]
    if not instance.busy:
        free = instance.devices.count - sum(group.degree for group in solution)
        return [Place(d)] * (free // d)
    taken = {device for group in solution for device in group.on}
    idle = sorted((s, device) for device, s in enumerate(instance.busy) if device not in taken)
    return [Place(1, (device,), s) for s, device in idle] if d == 1 else []


def insert(instance: Instance, solution: Solution, k: int) -> bool:
    """Put one job of a class into the pack, or a new pack, whose group then ends earliest."""
    best: tuple[float, int, Group] | None = None
    for g, group in enumerate(solution):
        parts = [pack.counts for pack in group.packs]
        for p in range(len(parts) + 1):
            if p < len(parts):
                changed = [*parts[:p], merge_counts(parts[p], ((k, 1),)), *parts[p + 1 :]]
            else:
                changed = [*parts, ((k, 1),)]
            made = make_group(instance, group.degree, changed, group.on)
            if made is not None and (best is None or made.seconds < best[0]):
                best = (made.seconds, g, made)
    if best is None:
        return False
    solution[best[1]] = best[2]
    return True


def split_group(instance: Instance, items: Counts, degree: int) -> Group | None:
    """Run a line of jobs on one group: split it into consecutive packs for the least time (dynamic
    programming).

    `items` keeps the caller's order of classes, which decides where a split may come.
    """
    key = ("group", items, degree)
    if key in instance.cache:
        return instance.cache[key]
    cuts = _cuts(instance, items)
    compile_s = instance.cost.compile_s
    best: list[tuple[float, tuple[Choice, ...]] | None] = [(0.0, ())] + [None] * (len(cuts) - 1)
    for j in range(1, len(cuts)):
        for i in range(j):
            head = best[i]
            if head is None:
                continue
            pack = choose_pack(instance, merge_counts(items[cuts[i] : cuts[j]]), degree)  # a class may repeat
            if pack is None:
                continue
            seconds = head[0] + compile_s + pack.run_s
            current = best[j]
            if current is None or seconds < current[0]:
                best[j] = (seconds, (*head[1], pack))
    end = best[-1]
    group = None if end is None else Group(degree, end[1], group_seconds(instance, list(end[1])))
    instance.cache[key] = group
    return group


def _cuts(instance: Instance, items: Counts) -> list[int]:
    """Return the places in a line of classes where packs may be split, both ends included."""
    if len(items) <= SPLIT_CLASSES:
        return list(range(len(items) + 1))

    def kind(k: int, fine: bool) -> tuple:
        job = instance.classes[k]
        return (job.row_tokens, job.max_row_tokens, job.bucket) + ((job.batch_size,) if fine else ())

    for fine in (True, False):
        changes = [i for i in range(1, len(items)) if kind(items[i][0], fine) != kind(items[i - 1][0], fine)]
        if len(changes) < SPLIT_CLASSES:
            break
    else:
        changes = changes[:: -(-len(changes) // SPLIT_CLASSES)]
    return [0, *changes, len(items)]
