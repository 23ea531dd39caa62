"""The command `pergrad`: finds the command, and turns what goes wrong into a message and an exit code."""

from __future__ import annotations

import importlib.util
import sys

# What the extra `experiments` brings, by the names of its modules.
NEEDED = (
    "flax",
    "orbax",
    "grain",
    "tyro",
    "rich",
    "tokenizers",
    "sacrebleu",
    "gymnasium",
    "ale_py",
    "tensorboardX",
    "PIL",
    "resvg_py",
)


def main(arguments: list[str] | None = None) -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"pergrad: {', '.join(missing)} missing: pip install 'pergrad[experiments]'", file=sys.stderr)
        sys.exit(2)
    from . import commands
    from .errors import BadInput, DiskFull, Diverged, Stopped, disk_full, is_disk_full

    try:
        commands.run(sys.argv[1:] if arguments is None else arguments)
    except (BadInput, Diverged, DiskFull, Stopped) as error:
        print(f"pergrad: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("pergrad: stopped", file=sys.stderr)
        sys.exit(Stopped.exit_code)
    except BrokenPipeError:  # `pergrad list | head`
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        if not is_disk_full(error):
            raise
        print(f"pergrad: {disk_full(error.filename or 'a file', 'and try again.')}", file=sys.stderr)
        sys.exit(DiskFull.exit_code)


if __name__ == "__main__":
    main()
