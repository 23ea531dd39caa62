"""What ends a run early: each with one or two lines for the user, and an exit code."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable
from pathlib import Path


class BadInput(Exception):
    """What was given cannot be done; the message says what to write instead. Nothing was changed."""

    exit_code = 2


class Diverged(Exception):
    """The loss, a gradient or an update is not finite any more."""

    exit_code = 3


class DiskFull(Exception):
    exit_code = 4


class Stopped(Exception):
    """By Ctrl-C or SIGTERM, with a checkpoint written."""

    exit_code = 130


def unknown(kind: str, given: str, known: Iterable[str], where: str = "") -> BadInput:
    """``unknown task 'cifar': did you mean 'cifar10'?``"""
    known = list(known)
    near = difflib.get_close_matches(given, known, n=1, cutoff=0.5)
    near = near or [name for name in known if given and (name.startswith(given) or name.endswith("." + given))][:1]
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(sorted(known)) or '(none)'}."
    return BadInput(f"unknown {kind} {given!r}{where}: {hint}")


# No space, over quota, and over the largest size that a file may have.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_WORDS = ("No space left", "ENOSPC", "Disk quota", "RESOURCE_EXHAUSTED", "File too large")


def is_disk_full(error: BaseException) -> bool:
    """Whether a disk ran full, which C++ libraries can only say in words."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _FULL:
            return True
        if (
            not isinstance(seen, OSError)
            and any(word in str(seen) for word in _FULL_WORDS)
            and "memory" not in str(seen)
        ):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def disk_full(path: Path | str, then: str) -> DiskFull:
    return DiskFull(f"the disk is full: could not write {path}. Make room there, {then}")
