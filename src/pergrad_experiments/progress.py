"""How far a run is: a bar on a terminal, and a line now and then in a pipe or a file."""

from __future__ import annotations

import time
from typing import Any

LINE_SECONDS = 10.0


class Progress:
    def __init__(self, title: str, start: int, total: int, show: bool):
        self.title, self.start, self.total, self.show = title, start, total, show
        self.began: float | None = None
        self.first = start
        self.said = time.perf_counter()
        self.bar: Any = None

    def __enter__(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.console = Console(stderr=True, highlight=False)
        if self.show and self.console.is_terminal:
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
            columns += (
                TextColumn("{task.fields[speed]}"),
                TextColumn("loss {task.fields[loss]:.4g}"),
                TimeRemainingColumn(),
            )
            self.bar = Bar(*columns, console=self.console)
            self.bar.start()
            self.row = self.bar.add_task(
                self.title, total=self.total, completed=self.start, loss=float("nan"), speed="compiling"
            )
        return self

    def __exit__(self, *_: Any) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, step: int, loss: float) -> None:
        now = time.perf_counter()
        if self.began is None:  # compiled by now; speed counts from here
            self.began, self.first = now, step
        speed = (step - self.first) / (now - self.began) if step > self.first else 0.0
        if self.bar is not None:
            self.bar.update(self.row, completed=step, loss=loss, speed=f"{speed:.1f} steps/s" if speed else "")
        elif self.show and (now - self.said > LINE_SECONDS or step == self.total):
            self.said = now
            left = f", {(self.total - step) / speed:.0f} s left" if speed and step < self.total else ""
            self.console.print(f"{self.title}: step {step}/{self.total}, loss {loss:.4g}, {speed:.1f} steps/s{left}")
