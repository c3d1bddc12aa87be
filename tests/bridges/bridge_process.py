"""Runs `examples/bridge_adapt.py` several times: Bridge is imported once, and every run is a fork of that process.

Reads `{name: [argument, ...]}` from standard input and writes NAME.log and codes.json into the folder it is given. The
first argument says how: `run`, `pair` (two ranks), `stock` (with Bridge's own forward step), or `build` (a recipe,
without training).
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

from bebop_megatron.launcher import free_port, rank_environment

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "bridge_adapt.py"


def _run(arguments: list[str]) -> None:
    from megatron.bridge.training.gpt_step import forward_step

    from bebop_megatron.bridges import recipes

    example = runpy.run_path(str(EXAMPLE), run_name="example")
    how, *words = arguments
    if how == "build":
        recipe = recipes.load(recipes.FOLDER / f"{words[0]}.yaml", **example["changes"](words[1:]))
        model = recipe.container.model
        print(json.dumps([model.mtp_num_layers, model.mtp_detach_heads, len(recipe.callbacks)]))
        return
    if how == "stock":
        load = recipes.load
        recipes.load = lambda *a, **k: recipes.Recipe(load(*a, **k).container, [], forward_step)
    example["main"](words[0], words[1:], True)


def _fork(arguments: list[str], log: Path, environment: dict[str, str]) -> int:
    """Start a rank; -> its process id."""
    child = os.fork()
    if child:
        return child
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ.update(environment)
    code = 1
    try:
        _run(arguments)
        code = 0
    except SystemExit as end:
        code = 0 if not end.code else 1
        print(end.code)
    except BaseException:  # noqa: BLE001 - the parent must hear of whatever ended the run
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Fork the runs that standard input asks for."""
    from bebop_megatron.platform.bridge import enter_bridge

    folder = Path(sys.argv[1])
    runs = json.loads(sys.stdin.read())
    enter_bridge()
    codes = {}
    for name, arguments in runs.items():
        world, port = 2 if arguments[0] == "pair" else 1, free_port()
        ranks = [_fork(arguments, folder / f"{name}.log", rank_environment(i, world, port)) for i in range(world)]
        codes[name] = max(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks)
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
