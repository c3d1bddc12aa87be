"""`python -m bebop_megatron.patch --megatron PATH {check,apply,revert}`: our patches for a Megatron-LM source tree.

`git apply` does the work. This file decides whether it may: a known version, no uncommitted changes, every hunk in its
place. Nothing is written unless all of it can be.
"""

from __future__ import annotations

import argparse
import enum
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

# in the repository a link to its top level, in an installed package a folder
PATCHES = Path(__file__).resolve().parent / "patches"
# a user's own settings must change neither line ends nor what counts as equal
_SETTINGS = ("core.autocrlf=false", "apply.whitespace=nowarn", "apply.ignoreWhitespace=no")


class State(enum.Enum):
    """What a patch is to a tree."""

    FITS = "not applied, fits"
    APPLIED = "applied"
    CONFLICT = "DOES NOT FIT"


def _git(tree: Path, *arguments: str, own: bool = True) -> subprocess.CompletedProcess[str]:
    """Run git in `tree`. `own`: a repository around the tree is none of ours, paths are relative to the tree."""
    environment = os.environ | {"LC_ALL": "C"}
    if own:
        environment["GIT_CEILING_DIRECTORIES"] = str(tree.parent)
    settings = [word for setting in _SETTINGS for word in ("-c", setting)]
    command = ["git", *settings, *arguments]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class Patch:
    """One file of `patches/megatron-lm-<version>/`, and the script that it changes."""

    file: Path

    @property
    def name(self) -> str:
        return self.file.stem

    @property
    def target(self) -> str:
        """Path in the tree of the one file that it changes."""
        return re.findall(r"^\+\+\+ b/(.+)$", self.file.read_text(), flags=re.M)[0]

    @property
    def before(self) -> str:
        """Git's hash of the release's own file."""
        return re.findall(r"^index ([0-9a-f]{40})\.\.", self.file.read_text(), flags=re.M)[0]

    def fits(self, tree: Path, *, reverse: bool = False) -> bool:
        """Whether all of it could be applied, or taken off; writes nothing."""
        return _git(tree, "apply", "--check", *["-R"] * reverse, str(self.file)).returncode == 0

    def state(self, tree: Path) -> State:
        """Whether it is applied, could be, or neither."""
        if self.fits(tree, reverse=True):
            return State.APPLIED
        return State.FITS if self.fits(tree) else State.CONFLICT

    def misfits(self, tree: Path) -> list[str]:
        """Lines for the user: every hunk that has no place, with the lines that were looked for.

        A patched file that was changed afterwards is compared with the patched state, which is the nearer one.
        """
        forward, backward = self._lost(tree), self._lost(tree, reverse=True)
        lost = backward if len(backward) < len(forward) else forward
        if not lost:
            done = _git(tree, "apply", "--check", str(self.file))
            return [line.removeprefix("error: ") for line in done.stderr.splitlines()]
        known = set((tree / self.target).read_text(errors="replace").splitlines())
        lines = []
        for text, number in lost:
            lines.append(f"{self.target}, about line {number}: looked for these lines; > is nowhere in the file")
            lines += [f"  {'|' if line in known else '>'} {line}" for line in text.rstrip("\n").splitlines()]
        return lines

    def _lost(self, tree: Path, *, reverse: bool = False) -> list[tuple[str, str]]:
        """Text and line number of each hunk without a place."""
        # --reject looks at every hunk, where --check alone stops at the first of a file
        options = ["--check", "--reject", "--verbose", *["-R"] * reverse]
        errors = _git(tree, "apply", *options, str(self.file)).stderr
        pattern = r"error: while searching for:\n(.*?)\nerror: patch failed: [^\n]+:(\d+)\n"
        return re.findall(pattern, errors, flags=re.DOTALL)


@dataclass(frozen=True)
class Tree:
    """A Megatron-LM source tree: where it is and which release it says it is."""

    path: Path
    version: str

    @classmethod
    def at(cls, path: Path) -> Tree:
        """Read the version of the tree at `path`.

        Raises:
            ValueError: no Megatron-LM source tree.
        """
        path = path.resolve()
        info = path / "megatron" / "core" / "package_info.py"
        if not info.is_file():
            raise ValueError(f"{path} is no Megatron-LM source tree: it has no megatron/core/package_info.py")
        numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", info.read_text(), flags=re.M))
        if len(numbers) != 3:
            raise ValueError(f"{info} does not say MAJOR, MINOR and PATCH: this version is unknown")
        return cls(path, ".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH")))

    def patches(self, root: Path) -> list[Patch]:
        """The patches for this version.

        Raises:
            ValueError: there are none.
        """
        release = self.version.rsplit(".", 1)[0]
        found = sorted((root / f"megatron-lm-{release}").glob("*.patch"))
        if not found:
            known = sorted(p.name.removeprefix("megatron-lm-") for p in root.glob("megatron-lm-*"))
            have = f"there are patches for {', '.join(known)}" if known else f"no patches were found in {root}"
            raise ValueError(f"{self.path} is Megatron-LM {self.version}, for which there are no patches: {have}")
        return [Patch(file) for file in found]

    def changed(self) -> set[str] | None:
        """Tracked files that differ from the last commit, relative to the tree; None outside git.

        Raises:
            ValueError: git refuses to read the tree.
        """
        done = _git(
            self.path, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=no", "--", ".", own=False
        )
        if done.returncode:
            if "not a git repository" in done.stderr:
                return None
            raise ValueError(f"git cannot read {self.path}: {done.stderr.strip()}")
        prefix = _git(self.path, "rev-parse", "--show-prefix", own=False).stdout.strip()
        return {entry[3:].removeprefix(prefix) for entry in done.stdout.split("\0") if entry}

    def is_ours_alone(self, patch: Patch) -> bool:
        """Whether the changed file is exactly the committed one with our patch."""
        committed = _git(self.path, "show", f"HEAD:./{patch.target}", own=False)
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder).resolve() / patch.target
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((self.path / patch.target).read_bytes())
            if _git(Path(folder).resolve(), "apply", "-R", str(patch.file)).returncode:
                return False
            return copy.read_bytes() == committed.stdout.encode()

    def require_clean(self, patches: list[Patch], states: dict[str, State], only: set[str] | None = None) -> None:
        """Refuse a tree that we could not give back as it was.

        Raises:
            ValueError: with the files in question; `only` says which ones count.
        """
        changed = self.changed()
        if changed is None:
            foreign = [
                p.target for p in patches if states[p.name] is State.FITS and blob(self.path / p.target) != p.before
            ]
            if foreign:
                raise ValueError(
                    f"{self.path} is not under git, and {', '.join(foreign)} is not the file of release "
                    f"{self.version}: commit the tree to git first, so that every change can be told from ours"
                )
            return
        ours = {p.target for p in patches if states[p.name] is State.APPLIED and self.is_ours_alone(p)}
        dirty = changed - ours if only is None else (changed - ours) & only
        if dirty:
            raise ValueError(
                f"{self.path} has changes that are not committed: {', '.join(sorted(dirty))}. Commit or "
                "stash them first"
            )


def blob(file: Path) -> str:
    """Git's hash of a file's content; empty where there is no file."""
    if not file.is_file():
        return ""
    data = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _report(tree: Tree, patches: list[Patch], states: dict[str, State]) -> None:
    width = max(len(p.name) for p in patches)
    for patch in patches:
        print(f"  {patch.name:<{width}}  {patch.target}: {states[patch.name].value}")
        if states[patch.name] is State.CONFLICT:
            print("\n".join(f"    {line}" for line in patch.misfits(tree.path)))


def _change(tree: Tree, patches: list[Patch], *, reverse: bool) -> None:
    """Apply or take off several patches, all or none.

    Raises:
        ValueError: git would not, with its reason; nothing has been written.
    """
    modes = {tree.path / p.target: (tree.path / p.target).stat().st_mode for p in patches}
    done = _git(tree.path, "apply", *["-R"] * reverse, *(str(p.file) for p in patches))
    if done.returncode:
        raise ValueError(f"nothing was changed; git apply says: {done.stderr.strip()}")
    for file, mode in modes.items():
        # git writes a new file
        file.chmod(mode)


def run(tree: Tree, patches: list[Patch], action: str) -> int:
    """Check, apply or revert; the exit status.

    Raises:
        ValueError: the tree is refused; nothing has been written.
    """
    states = {patch.name: patch.state(tree.path) for patch in patches}
    conflicts = [p for p in patches if states[p.name] is State.CONFLICT]
    todo = [p for p in patches if states[p.name] is (State.APPLIED if action == "revert" else State.FITS)]
    if action == "check" or conflicts:
        _report(tree, patches, states)
    if conflicts:
        raise ValueError(f"{', '.join(p.name for p in conflicts)}: the tree has other code there; nothing was changed")
    if action == "check":
        tree.require_clean(patches, states)
        return 0
    if not todo:
        print(f"  nothing to do: {'no patch is' if action == 'revert' else 'every patch is already'} applied")
        return 0
    tree.require_clean(patches, states, {p.target for p in todo} if action == "revert" else None)
    _change(tree, todo, reverse=action == "revert")
    _report(tree, patches, {patch.name: patch.state(tree.path) for patch in patches})
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command line; exit status 0 when all is well, 2 when the tree was refused."""
    parser = argparse.ArgumentParser(
        prog="python -m bebop_megatron.patch",
        description="Let the training scripts of a Megatron-LM source tree take our flags.",
    )
    parser.add_argument("--megatron", type=Path, required=True, metavar="PATH", help="the Megatron-LM source tree")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="one patch alone (may be repeated): pretrain_gpt"
    )
    parser.add_argument("--patches", type=Path, default=PATCHES, help="folder of patches (default: our own)")
    parser.add_argument("action", choices=("check", "apply", "revert"), help="check writes nothing")
    options = parser.parse_args(arguments)
    try:
        tree = Tree.at(options.megatron)
        patches = tree.patches(options.patches.resolve())
        unknown = set(options.only or ()) - {p.name for p in patches}
        if unknown:
            names = ", ".join(p.name for p in patches)
            raise ValueError(f"no patch is called {', '.join(sorted(unknown))}: choose out of {names}")
        if options.only:
            patches = [p for p in patches if p.name in options.only]
        print(f"Megatron-LM {tree.version} in {tree.path}")
        return run(tree, patches, options.action)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FileNotFoundError as error:
        print(f"error: {error}; git must be installed", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
