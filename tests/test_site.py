"""Which devices and cores the workers of a sweep get, and what is said when there are none."""

import os
from dataclasses import asdict
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

import planner
from planner import JobSpec, Options, decoder_shape, make_plan
from plora_jax import machine, planning
from plora_jax.errors import UserError
from plora_jax.launch import site
from plora_jax.launch.site import LaunchOptions, core_shares, find_site
from plora_jax.machine import Gpu

H200 = [Gpu("NVIDIA H200", 143771, "580", f"GPU-{i}", 500) for i in range(4)]


@pytest.fixture
def here(monkeypatch):
    """A machine whose GPUs, and JAX plugins, the test sets; with no GPU at first."""
    found = SimpleNamespace(
        gpus=[], plugins=[EntryPoint("xla_cuda13", "jax_plugins.xla_cuda13", "jax_plugins")]
    )
    for module in (machine, site):
        monkeypatch.setattr(module, "gpus", lambda: found.gpus)
    monkeypatch.setattr(site, "entry_points", lambda group: found.plugins)
    for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_a_gpu_each(here):
    here.gpus = H200
    found = find_site(LaunchOptions(), "auto")
    assert [(group.worker, group.gpus, group.devices) for group in found.groups] == [
        (str(i), 1, (f"GPU-{i}",)) for i in range(4)
    ]
    assert (found.devices.spec.name, found.devices.count, found.note) == ("H200", 4, "")
    assert found.groups[0].memory_fraction == 0.95
    assert len(find_site(LaunchOptions(workers=2), "auto").groups) == 2
    two = find_site(LaunchOptions(), "2xH200")
    assert (len(two.groups), two.devices.count) == (2, 2)


def test_only_what_is_visible(here, monkeypatch):
    here.gpus = H200
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert [group.devices for group in find_site(LaunchOptions(), "auto").groups] == [("GPU-3",), ("GPU-1",)]


def test_a_gpu_in_use_and_one_of_another_kind_are_left_out(here):
    here.gpus = [H200[0], H200[1]._replace(used_mib=70000), Gpu("NVIDIA L4", 23034, "580", "GPU-L", 0)]
    found = find_site(LaunchOptions(), "1xH200")
    assert [group.devices for group in found.groups] == [("GPU-0",)] and found.devices.count == 1
    assert "GPU-1 is left out: other programs use 68 of its 140 GiB" in found.note
    assert "GPU-L is left out: it is a NVIDIA L4, and 1xH200 is asked for" in found.note
    with pytest.raises(UserError, match=r"devices: 2xH200: 3 GPUs here, 1 of them free; GPU-1 is left out"):
        find_site(LaunchOptions(), "2xH200")
    with pytest.raises(UserError, match="--workers 3: 3 GPUs here, 2 of them free"):
        find_site(LaunchOptions(workers=3), "auto")
    here.gpus = here.gpus[1:2]
    with pytest.raises(UserError, match="devices: auto: 1 GPU here, 0 of them free"):
        find_site(LaunchOptions(), "auto")


def test_gpus_of_several_types_are_numbered_type_after_type(here):
    a100 = [Gpu("NVIDIA A100-SXM4-40GB", 40960, "580", f"GPU-A{i}", 0) for i in range(2)]
    here.gpus = [H200[0], a100[0], H200[1], a100[1]]
    found = find_site(LaunchOptions(), "auto")
    assert [(group.worker, group.devices) for group in found.groups] == [
        ("0", ("GPU-0",)),
        ("1", ("GPU-1",)),
        ("2", ("GPU-A0",)),
        ("3", ("GPU-A1",)),
    ]
    assert str(found.devices) == str(planning.find_devices("auto")) == "2 × H200 + 2 × A100-40GB"
    assert found.note == "on 2 × H200 + 2 × A100-40GB: a worker takes packs that are planned for its own type"
    asked = find_site(LaunchOptions(), "1xA100-40GB+2xH200")  # the plan's order, not the machine's
    assert [group.devices[0] for group in asked.groups] == ["GPU-A0", "GPU-0", "GPU-1"]
    assert [asked.devices.type_of(n).name for n in range(3)] == ["A100-40GB", "H200", "H200"]
    assert [group.devices for group in find_site(LaunchOptions(workers=1), "auto").groups] == [("GPU-0",)]
    assert [group.devices for group in find_site(LaunchOptions("inline"), "auto").groups] == [("GPU-0",)]
    here.gpus = here.gpus[1:]
    with pytest.raises(UserError, match=r"devices: 1xA100-40GB\+2xH200: 3 GPUs here, 3 of them free"):
        find_site(LaunchOptions(), "1xA100-40GB+2xH200")
    with pytest.raises(UserError, match=r"--workers 3: devices: 1xH200\+1xA100 says how many of each"):
        find_site(LaunchOptions(workers=3), "1xH200+1xA100")
    with pytest.raises(UserError, match=r"but this machine has .*H200.*, no L40S; use auto"):
        find_site(LaunchOptions(), "1xL40S+1xH200")


def test_gpus_that_no_table_knows_are_planned_as_another_type_and_two_names_of_one_type_are_one(here):
    here.gpus = [H200[0], Gpu("NVIDIA L4", 23034, "580", "GPU-L", 0)]
    found = find_site(LaunchOptions(), "auto")
    assert str(found.devices) == "1 × H200 + 1 × A10" and found.note.endswith(
        "a NVIDIA L4 is planned as a A10"
    )
    here.gpus = [
        Gpu("NVIDIA H100 PCIe", 81559, "580", "GPU-P", 0),
        Gpu("NVIDIA H100 80GB HBM3", 81000, "580", "GPU-S", 0),
    ]
    found = find_site(LaunchOptions(), "auto")
    assert (str(found.devices), found.devices.spec.memory_bytes) == ("2 × H100", 81000 * 2**20)


def test_memory_that_others_hold_is_not_taken(here):
    here.gpus = [Gpu("NVIDIA A10G", 23028, "580", "GPU-0", 2000)]
    [group] = find_site(LaunchOptions(), "auto").groups
    assert group.memory_fraction == pytest.approx(1 - (2000 + 1536) / 23028)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda here, env: None, "no NVIDIA GPU was found"),
        (
            lambda here, env: env("CUDA_VISIBLE_DEVICES", ""),
            "CUDA_VISIBLE_DEVICES= names none of the GPUs here",
        ),
        (lambda here, env: env("JAX_PLATFORMS", "cpu"), "JAX_PLATFORMS=cpu is set"),
        (lambda here, env: here.plugins.clear(), "JAX's CUDA build is not installed for the GPUs here"),
    ],
)
def test_without_a_gpu_the_cpu_only_where_it_was_asked_for(here, monkeypatch, change, why):
    here.gpus = [] if "found" in why else H200
    change(here, monkeypatch.setenv)
    auto = find_site(LaunchOptions(), "auto")
    assert [group.gpus for group in auto.groups] == [0] and auto.devices.spec.name == "cpu"
    assert auto.note.startswith(why) and auto.note.endswith(": running on the CPU")
    assert find_site(LaunchOptions(), "cpu").note == ""
    with pytest.raises(UserError, match="devices: 8xH200 is asked for, but "):
        find_site(LaunchOptions(), "8xH200")


def test_cpu_workers_share_cores_and_memory(here, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 8})
    monkeypatch.setattr(site, "memory_bytes", lambda: 6 * 10**9)
    found = find_site(LaunchOptions(workers=2), "cpu")
    assert [(group.cores, group.threads) for group in found.groups] == [((0, 2), 2), ((1, 3), 2)]
    assert (found.devices.count, found.devices.spec.memory_bytes, found.devices.spec.cores) == (
        2,
        3 * 10**9,
        2,
    )
    stated = find_site(LaunchOptions(workers=2), "cpu-4GB")  # the memory of each, as stated
    spec = stated.devices.spec
    assert (stated.devices.count, spec.memory_bytes, spec.cores) == (2, 4 * 10**9, 2)
    with pytest.raises(UserError, match="--workers 6: this process may use 5 CPU cores"):
        find_site(LaunchOptions(workers=6), "cpu")


def test_core_shares(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert core_shares(4) == [(0, 4), (1, 5), (2, 6), (3, 7)]  # 0 and 4: two threads of one core
    assert core_shares(3) == [(0, 3), (1, 4), (2, 5)]
    assert core_shares(9) == [tuple(range(8))] * 9


def test_another_kind_than_is_there(here):
    here.gpus = H200
    with pytest.raises(
        UserError, match="devices: 2xA100-40GB is asked for, but this machine has NVIDIA H200, no A100-40GB"
    ):
        find_site(LaunchOptions(), "2xA100-40GB")


def test_inline_is_one_worker_without_a_launcher(here):
    found = find_site(LaunchOptions("inline"), "auto")
    assert found.launcher is None and len(found.groups) == 1
    with pytest.raises(UserError, match="--workers 2: with --launcher inline there is one"):
        find_site(LaunchOptions("inline", workers=2), "auto")


def test_a_lost_gpu_is_named(here):
    here.gpus = H200
    found = find_site(LaunchOptions(), "auto")
    here.gpus = H200[:3]
    assert site._lost_gpu(found.groups[3]) == "the driver no longer finds GPU-3"
    assert site._lost_gpu(found.groups[2]) == ""
    assert planning.find_devices("auto").count == 3


def test_a_gpu_that_this_process_uses_already(here):
    here.gpus = [H200[0]._replace(used_mib=108_000)]
    with pytest.raises(UserError, match="1 GPU here, 0 of them free"):
        find_site(LaunchOptions("inline"), "auto")
    found = find_site(LaunchOptions("inline"), "H200", held=100 * 2**30)
    assert found.launcher is None and len(found.groups) == found.devices.count == 1
    assert found.devices.spec.limit_bytes == pytest.approx(100 * 2**30, rel=1e-6)
    assert find_site(LaunchOptions("inline"), "auto", held=2**40).devices.spec.memory_bytes == 143771 * 2**20


def a10(count):
    return [Gpu("NVIDIA A10", 23028, "580", f"GPU-A{i}", 0) for i in range(count)]


@pytest.mark.parametrize(
    ("gpus", "n", "degrees", "kinds"),
    [
        (H200, 3, {4}, ["H200"] * 3),
        ([*a10(4), H200[0]], 24, {1, 2}, ["H200"]),  # 14B in bf16, 28 GiB, is more than an A10 holds
    ],
)
def test_what_runs_is_planned_for_a_gpu_a_pack(here, gpus, n, degrees, kinds):
    """`degrees` are what a plan of groups has; `kinds` the devices that are used when packs are on one each."""
    here.gpus = gpus
    found = find_site(LaunchOptions(), "auto").devices
    shape = decoder_shape("Qwen2.5-14B", 48, 5120, 13824, 40, 8, 128, 152064)
    jobs = [JobSpec(str(i), 16, 8, 2000, 200.0, 400) for i in range(n)]
    plain = Options(baselines=False)
    stated = make_plan(jobs, shape, planning.find_devices("auto"), precision="bf16", options=plain)
    assert {pack.degree for pack in stated.packs} == degrees
    plan = make_plan(jobs, shape, found, precision="bf16", options=plain)
    assert {pack.degree for pack in plan.packs} == {1}
    assert (
        sorted(found.type_of(on).name for on in {on for pack in plan.packs for on in pack.devices}) == kinds
    )
    assert planner.devices_from(asdict(found)) == found  # from which a run plans again, and what is added


def test_a_base_that_no_single_gpu_holds_is_refused(here):
    here.gpus = a10(4)
    shape = decoder_shape("Qwen2.5-14B", 48, 5120, 13824, 40, 8, 128, 152064)
    with pytest.raises(planner.PlanError) as refused:
        make_plan([JobSpec("a", 16, 8, 2000, 200.0, 400)], shape, find_site(LaunchOptions(), "auto").devices)
    assert "on each of 1 A10, which may use 20.7 GiB" in str(refused.value)
    assert "devices would hold it" not in str(refused.value)  # for packs are on one each
