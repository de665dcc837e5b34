"""Groups and lines: a line in which a class comes twice loses no job."""

from planner.greedy import Line, cut
from planner.groups import Place, split_group
from planner.pack import merge_counts
from planner.search import improve
from tests.planner.problems import instance, job


def test_a_class_that_comes_twice_in_a_line_is_one_class_in_its_pack():
    problem = instance([job(i, 16, 4, 1) for i in range(8)] + [job(10, 8, 4, 1)], "2xA100-40GB")
    (a, n), (b, _) = sorted(problem.counts, key=lambda item: -item[1])
    line = ((a, 3), (b, 1), (a, n - 3))
    group = split_group(problem, line, 1)
    assert merge_counts(*(pack.counts for pack in group.packs)) == problem.counts
    assert all(len({k for k, _ in pack.counts}) == len(pack.counts) for pack in group.packs)
    solution = cut(Line(problem, line), (Place(1), Place(1)), 1e9)
    found = improve(problem, solution, 300)
    assert merge_counts(*(pack.counts for g in found for pack in g.packs)) == problem.counts
