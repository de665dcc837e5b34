"""Where a step's time goes: the kernels of a profile, sorted by what the program was doing in them."""

import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

PARTS = ("frozen products", "adapters", "attention", "head and loss", "optimizer", "elementwise", "copies")

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = .*? ([a-z][\w\-]*)\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{\s*$")
_CONTROL = {"while", "conditional", "call"}  # their time is that of the instructions inside
_PRODUCT = re.compile(r"\b(?:dot|convolution)\b|cublas|gemm|nvjet|cutlass|mosaic", re.I)
_COPY = re.compile(r"^(?:copy|slice|dynamic-slice|dynamic-update-slice|concatenate|memcpy|memset)", re.I)


class Instruction(NamedTuple):
    """Hold what sorts an instruction of a compiled program: what it is made of, and where it comes from."""

    opcodes: tuple[str, ...]  # of a fusion, those of its computation
    target: str  # of a custom call
    source: str  # the path of named scopes and functions it was traced in


def read_instructions(text: str) -> dict[str, Instruction]:
    """Read the instructions of a compiled program, as `compiled.as_text()` prints them, by name."""
    bodies: dict[str, list[tuple[str, str, str]]] = {}
    body: list[tuple[str, str, str]] = []
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if found := _COMPUTATION.match(line):
            body = bodies.setdefault(found[1], [])
        elif found := _INSTRUCTION.match(line):
            body.append((found[1], found[2], line))

    def field(pattern: str, line: str) -> str:
        found = re.search(pattern, line)
        return found[1] if found else ""

    out = {}
    for name, opcode, line in (entry for body in bodies.values() for entry in body):
        inner = bodies.get(field(r"calls=%([\w.\-]+)", line), [])
        lines = [line, *(text for _, _, text in inner)]
        sources = [source for source in (field(r'op_name="([^"]*)"', one) for one in lines) if source]
        opcodes = tuple(op for _, op, _ in inner if op not in ("parameter", "bitcast", "constant")) or (
            opcode,
        )
        targets = [field(r'custom_call_target="([^"]*)"', one) for one in lines]
        out[name] = Instruction(opcodes, "".join(targets), sources[0] if sources else "")
    return out


def part_of(kernel: str, instruction: Instruction | None) -> str:
    """Say which of PARTS a kernel belongs to; without its instruction its own name decides."""
    opcodes, target, source = instruction or Instruction((kernel,), "", "")
    if re.search(r"fmha|attention|flash", f"{kernel} {target} {source}", re.I):
        return "attention"
    for scope, part in (("optimizer", "optimizer"), ("loss", "head and loss")):
        if re.search(rf"\b{scope}\b", source):
            return part
    if re.search(r"\brounding\b", source):  # to 8 bits, by a kernel of its own
        return "elementwise"
    if _PRODUCT.search(f"{kernel} {target} {' '.join(opcodes)}"):
        return "adapters" if re.search(r"\blora\b", source) else "frozen products"
    if all(_COPY.match(op) for op in opcodes) or re.match(r"memcpy|memset", kernel, re.I):
        return "copies"
    return "adapters" if re.search(r"\blora\b", source) else "elementwise"


def breakdown(text: str, directory: Path, steps: int) -> dict[str, float]:
    """Sum a profile's kernels by part, in ms a step, and add `gaps`, when nothing ran.

    Kernels that ran side by side count each; so the parts may sum to more than the time.

    Args:
      text: the compiled program. directory: where `jax.profiler` wrote the profile. steps: how many of the program's
        runs are in it.
    """
    from jax.profiler import ProfileData

    instructions = read_instructions(text)
    by_kernel = {name.replace(".", "_"): value for name, value in instructions.items()}
    parts, spans = dict.fromkeys(PARTS, 0.0), []
    for file in directory.rglob("*.xplane.pb"):
        for kernel, op, start, length in _events(ProfileData.from_file(str(file))):
            instruction = instructions.get(op) or by_kernel.get(kernel)
            if instruction and set(instruction.opcodes) <= _CONTROL:
                continue
            parts[part_of(kernel, instruction)] += length
            spans.append((start, start + length))
    busy, end = 0.0, 0.0
    for start, stop in sorted(spans):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    whole = (end - min(start for start, _ in spans)) if spans else 0.0
    return {name: ns / 1e6 / steps for name, ns in {**parts, "gaps": whole - busy}.items()}


def _events(profile: Any) -> Iterable[tuple[str, str, float, float]]:
    """Yield (kernel, HLO instruction, start ns, length ns) of what ran on the device."""
    devices = [plane for plane in profile.planes if plane.name.startswith("/device:")]
    for plane in devices or profile.planes:
        for line in plane.lines:
            for event in line.events:
                op = next((value for key, value in event.stats if key == "hlo_op"), "")
                if op or (devices and line.name.startswith("Stream")):
                    yield event.name, str(op), event.start_ns, event.duration_ns


def profile_steps(compiled: Any, run: Callable[[], Any], steps: int = 3) -> dict[str, float]:
    """Profile `steps` calls of `run`, each of which runs `compiled` once; return `breakdown`."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                out = run()
            jax.block_until_ready(out)
        return breakdown(compiled.as_text(), Path(folder), steps)
