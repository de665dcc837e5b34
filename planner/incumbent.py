"""Repair an earlier plan for changed jobs or devices, so that planning again never loses what was had."""

from collections.abc import Iterable

from planner.groups import Group, Place, Solution, insert, make_group, unused
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
        place = _place(instance, solution, devices) if len(devices) <= free else None
        group = make_group(instance, place.degree, parts, place.on) if place else None
        if group is None:
            orphans = merge_counts(orphans, *parts)
            continue
        free -= len(devices)
        solution.append(group)
    solution += [Group(place.degree, (), 0.0, place.on) for place in unused(instance, solution)]
    for k, n in orphans:
        for _ in range(n):
            if not insert(instance, solution, k):
                return None
    return [group for group in solution if group.packs]


def _place(instance: Instance, solution: Solution, devices: tuple[int, ...]) -> Place | None:
    """Return a place for a group of an earlier plan: where devices are busy its own, None where they are taken or are
    no devices of the instance.
    """
    if not instance.busy:
        return Place(len(devices))
    taken = {device for group in solution for device in group.on}
    return (
        Place(len(devices), devices)
        if 0 <= min(devices) <= max(devices) < instance.devices.count and not taken & set(devices)
        else None
    )
