"""Repair an earlier plan for changed jobs or devices, so that planning again never loses what was had."""

from collections.abc import Iterable

from planner.groups import Group, Solution, insert, make_group
from planner.instance import Counts, Instance
from planner.pack import merge_counts
from planner.plan import Pack


def repair(instance: Instance, packs: Iterable[Pack]) -> Solution | None:
    """Return the groups of an earlier plan with the jobs that still exist, and every other job where it costs least.

    Groups of a degree that is no longer possible, or for which no devices are left, give up their jobs. None
    where some job finds no place.
    """
    class_of = {job_id: k for k, ids in enumerate(instance.members) for job_id in ids}
    missing = dict.fromkeys(class_of)
    groups: dict[tuple[int, ...], list[Counts]] = {}
    for pack in sorted(packs, key=lambda pack: (pack.start_s, pack.devices)):
        kept = [job_id for job_id in pack.jobs if job_id in missing]
        if kept and pack.degree in instance.degrees:
            for job_id in kept:
                del missing[job_id]
            groups.setdefault(pack.devices, []).append(merge_counts(*(((class_of[j], 1),) for j in kept)))
    solution: Solution = []
    free = instance.devices.count
    orphans = merge_counts(*(((class_of[j], 1),) for j in missing))
    for devices, parts in sorted(groups.items(), key=lambda item: (-len(item[0]), item[0])):
        group = make_group(instance, len(devices), parts) if len(devices) <= free else None
        if group is None:
            orphans = merge_counts(orphans, *parts)
            continue
        free -= len(devices)
        solution.append(group)
    while free >= instance.degrees[0]:
        solution.append(Group(instance.degrees[0], (), 0.0))
        free -= instance.degrees[0]
    for k, n in orphans:
        for _ in range(n):
            if not insert(instance, solution, k):
                return None
    return [group for group in solution if group.packs]
