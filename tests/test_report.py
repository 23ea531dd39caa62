"""Reports: what is drawn is what was measured, and a run folder from anyone is only data."""

import base64
import html.parser
import itertools
import json
import math
import os
import re
import shutil
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import stats as scipy_stats

from pergrad_experiments import commands, report, runs, tasks
from pergrad_experiments.errors import BadInput
from pergrad_experiments.report import charts, load, panels

EVIL = "</script><script>window.pwned=1</script><img src=x onerror='window.pwned=1'>\u202e\x00"


def make_run(
    folder: Path, optimizer: str, seed: int, steps: int = 300, evil: bool = False, state: str = "done"
) -> Path:
    """A run folder by the real writer, with numbers that are known here."""
    options = {"model": "resnet"} if evil else {}
    config = tasks.configure("cifar10", optimizer, "smoke", seed=seed, steps=300, task_options=options)
    writer = runs.Folder.create(folder, config, {})
    rng = np.random.default_rng([seed, len(optimizer)])
    layer = f"dense/{EVIL}" if evil else "dense/kernel"
    lines = []
    for step in range(0, steps + 1, 50):
        at = {"step": step, "examples": 16 * step, "seconds": step / 10}
        lines.append(at | {"kind": "eval", "loss": 2.0 / (1 + step) + seed, "accuracy": 0.1 + step / 1000})
        outliers = [{"index": 5, "norm": 3.0, "loss": 1.0, "image": "outliers/a.png"}]
        if evil:
            outliers += [{"index": 6, "norm": 2.0, "loss": 1.0, "text": EVIL}]
        stats = {
            "snr": {layer: 1 / (1 + step), "out/bias": None},
            "share_mean": {layer: 0.25, "out/bias": 1.0},
            "noise_scale": {"scale": None, "trace": 30.0 + step, "squared_norm": -1.0 if step == 50 else 2.0},
            "norms": {"edges": [0.0, 1.0, 2.0, 3.0], "counts": [1, 12, 3]},
            "outliers": outliers,
        }
        lines.append(at | {"kind": "stats", **stats})
    for step in range(1, steps + 1):
        at = {"step": step, "examples": 16 * step, "seconds": step / 10, "kind": "train"}
        numbers = {
            "loss": 3 * math.exp(-step / 100) + 0.1 * seed,
            "step_length": 0.1 / step,
            "throughput": 50.0 + rng.random(),
        }
        lines.append(at | numbers)
    writer.append(lines)
    Image.new("RGB", (32, 32), (200, 30, 30)).save(folder / "outliers" / "a.png")
    writer.set_status(state, step=steps)
    writer.close()
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    top = tmp_path_factory.mktemp("runs")
    made = [make_run(top / f"{name}-{seed}", name, seed) for name in ("adam", "eve") for seed in (0, 1, 2)]
    return [*made, make_run(top / "evil", "sign_sgd", 0, evil=True)]


@pytest.fixture(scope="module")
def written(folders, tmp_path_factory):
    top = tmp_path_factory.mktemp("report")
    return report.write(folders, top / "report.html", figures=top / "figures"), top / "figures"


class Elements(html.parser.HTMLParser):
    """Which elements and attributes a page has, as a browser would see them."""

    def __init__(self, text):
        super().__init__()
        self.found, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)


# ------------------------------------------------------------------------------------- numbers


def test_curves_are_means_over_seeds_with_students_interval(folders):
    found = panels.groups([load.run(f) for f in folders[:6]])
    assert [g.label for g in found] == ["adam", "eve"]
    series = panels.curve(found[0], "examples", "loss", panels.of_train)
    bounds = np.linspace(0, 300, 201).astype(int)
    steps = np.arange(1, 301)
    losses = np.array([3 * np.exp(-steps / 100) + 0.1 * seed for seed in range(3)])
    expected = np.array([[row[a:b].mean() for a, b in itertools.pairwise(bounds)] for row in losses])
    half = scipy_stats.sem(expected, axis=0) * scipy_stats.t.ppf(0.975, 2)
    np.testing.assert_allclose(series.y, expected.mean(0), rtol=1e-12)
    np.testing.assert_allclose(np.subtract(series.high, series.low), 2 * half, rtol=1e-9)
    np.testing.assert_allclose(series.x, [16 * steps[a:b].mean() for a, b in itertools.pairwise(bounds)])


def test_a_seed_that_ends_early_counts_as_far_as_it_got(tmp_path):
    short = load.run(make_run(tmp_path / "a", "adam", 0, steps=100, state="diverged"))
    long = load.run(make_run(tmp_path / "b", "adam", 1))
    (group,) = panels.groups([short, long])
    series = panels.curve(group, "examples", "loss", panels.of_train, points=30)
    assert series.low[5] < series.y[5] < series.high[5]
    assert series.low[-1] == series.y[-1] == series.high[-1] == pytest.approx(np.mean(long.train["loss"][-10:]))
    assert short.state == "diverged at step 100" and short.final_loss() == math.inf


def test_final_table(folders):
    section = panels.sections([load.run(f) for f in folders[:6]])[0]
    table = section.blocks[0]
    adam = next(row for row in table.rows if row[0] == "adam")
    half = scipy_stats.sem([0.0, 1.0, 2.0]) * scipy_stats.t.ppf(0.975, 2)
    assert adam[1] == f"{2 / 301 + 1:.4g} ± {half:.4g}" and adam[2] == "0.4"
    assert adam[-2:] == ["3", "done"]


def test_noise_scale_is_a_ratio_of_sums(folders):
    (group,) = panels.groups([load.run(folders[0])])
    series = panels.noise_scale(group, parts=1)
    steps = np.arange(0, 301, 50)
    assert series.y == [pytest.approx((30.0 + steps).sum() / (2 * 6 - 1))]


def test_thin_keeps_means_and_ends():
    x = np.arange(1000.0)
    (means,) = charts.thin(x, points=70)
    assert len(means) == 70 and means[0] == x[: 1000 // 70].mean()
    assert (
        np.isnan(charts.thin(np.where(x == 500, np.nan, x), points=10)[0]).tolist()
        == [False] * 5 + [True] + [False] * 4
    )


@pytest.mark.parametrize("low, high", [(1e-7, 2e-7), (3e-5, 0.9), (0.9, 1.1), (1.0, 1e12), (5.0, 60.0)])
@pytest.mark.parametrize("log", [False, True])
def test_axes_have_ticks_inside(low, high, log):
    axis = charts.Axis.over([low, high], 0.0, 100.0, log)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 12 and len(set(map(charts.short, ticks))) == len(ticks)
    assert all(0 <= axis(t) <= 100 for t in ticks)
    assert 0 < axis(low) < axis(high) < 100


def test_more_configurations_than_a_plot_holds(tmp_path):
    made = []
    for k in range(15):
        folder = shutil.copytree(make_run(tmp_path / "one", "adam", 0, steps=50), tmp_path / str(k))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"learning_rate": 0.001 * (k + 1)}))
        shutil.rmtree(tmp_path / "one")
        made.append(load.run(folder))
    (section,) = panels.sections(made)
    assert len(section.blocks[0].rows) == 15 and "12 with the lowest" in section.lead
    assert len(section.blocks[1].series) == panels.DRAWN
    assert section.blocks[1].series[0].label == "adam, η 0.001"


# ------------------------------------------------------------------------------------- what is written


def test_page_is_one_file_without_network(written):
    text = written[0].read_text()
    page = Elements(text)
    for _, attrs in page.found:
        for name in ("src", "href", "action", "data"):
            assert not attrs.get(name) or attrs[name].startswith(("data:", "#")), attrs
    assert "url(" not in text and "@import" not in text
    assert {"Training loss", "Held-out accuracy", "Step length", "Gradient noise scale", "Throughput"} <= set(
        page.words
    )
    for tag, attrs in page.found:
        if tag == "svg" and "data-scale" in attrs:
            assert attrs["role"] == "img" and len(attrs["aria-label"]) > 20
        if tag == "img":
            assert attrs["alt"]


def test_text_of_a_run_folder_is_escaped(written):
    text = written[0].read_text()
    page = Elements(text)
    assert [tag for tag, _ in page.found].count("script") == 1
    assert not any(name.startswith("on") for _, attrs in page.found for name in attrs)
    assert "pwned" in text and "\x00" not in text and "\u202e" not in text
    assert any("window.pwned=1</script>" in words for words in page.words)


def test_figures_are_well_formed(written):
    paths = sorted(written[1].glob("*.svg"))
    assert len(paths) > 10
    for path in paths:
        root = ElementTree.parse(path).getroot()
        assert root.tag.endswith("svg") and not list(root.iter("{*}script"))
        assert "var(" not in path.read_text()
    legend = (written[1] / "cifar10-training-loss.svg").read_text()
    assert ">adam, model cnn<" in legend and ">eve, model cnn<" in legend
    image = Image.open(written[1] / "cifar10-training-loss.png").convert("L")
    assert image.width == 3 * charts.WIDTH and np.asarray(image).std() > 5


def test_png_without_a_font_is_refused(written):
    drawing = (written[1] / "cifar10-training-loss.svg").read_text()
    with pytest.raises(BadInput, match="fonts-dejavu-core"):
        report.rasterized(drawing, skip_system_fonts=True)


def test_report_is_written_again_but_nothing_else(folders, tmp_path):
    mine = tmp_path / "mine.html"
    mine.write_text("my notes")
    with pytest.raises(BadInput, match="is no report"):
        report.write(folders[:1], mine)
    assert mine.read_text() == "my notes"
    out = report.write(folders[:1], tmp_path / "new" / "report.html")
    before = out.read_text()
    report.write(folders[1:2], out)
    assert out.read_text() != before and list(out.parent.iterdir()) == [out]


def test_command(folders, capsys, tmp_path):
    commands.Report((folders[0],), out=tmp_path / "a.html").run()
    assert capsys.readouterr().out.strip() == str(tmp_path / "a.html")
    with pytest.raises(BadInput, match="pergrad report runs/NAME"):
        commands.Report(()).run()
    with pytest.raises(BadInput, match="is not there"):
        commands.Report((tmp_path / "nothing",)).run()
    with pytest.raises(BadInput, match=r"config\.json"):
        commands.Report((tmp_path,)).run()


# ------------------------------------------------------------------------------------- a folder from someone else


@pytest.fixture
def folder(folders, tmp_path):
    return shutil.copytree(folders[0], tmp_path / "run")


def add_lines(folder, *lines, end="\n"):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("\n".join(lines) + end)


def test_a_line_cut_short_is_normal(folder):
    before = load.run(folder)
    add_lines(folder, '{"kind": "train", "step": 301, "lo', end="")
    after = load.run(folder)
    assert after.skipped == 0 and len(after.train["loss"]) == len(before.train["loss"]) == 300


def test_lines_that_are_not_as_they_should_be(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(load, "LINE", 100_000)
    bad = [
        "[]",
        "{",
        "[" * 50_000,
        '{"kind": "train"}',
        '{"kind": "train", "step": "1"}',
        '{"kind": "x", "step": 1, "examples": 1}',
    ]
    bad += [
        '{"kind": "train", "step": NaN, "examples": 1}',
        '{"kind": "train", "step": 1, "examples": 1, "x": "%s"}' % ("y" * 200_000),
    ]
    fine = ['{"kind": "train", "step": 301, "examples": 1, "loss": 1%s, "throughput": "fast"}' % ("0" * 400)]
    fine += ['{"kind": "train", "step": 302, "examples": 1, "loss": [1], "step_length": true}']
    fine += [
        '{"kind": "stats", "step": 302, "examples": 1, "snr": 3, "noise_scale": [], "norms": {"edges": [1]}, "outliers": [4]}'
    ]
    add_lines(folder, *bad, *fine)
    found = load.run(folder)
    assert found.skipped == len(bad)
    assert len(found.train["loss"]) == 302 and np.isnan(found.train["loss"][-2:]).all()
    assert "8 lines of metrics.jsonl could not be read" in report.write([folder], tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    "name", ["../secret.png", "/etc/passwd", "outliers/link.png", "outliers/pipe.png", "outliers/text.png"]
)
def test_images_come_from_the_folder_alone(folder, name):
    secret = folder.parent / "secret.png"
    Image.new("RGB", (8, 8), (1, 2, 3)).save(secret)
    (folder / "outliers" / "link.png").symlink_to(secret)
    os.mkfifo(folder / "outliers" / "pipe.png")
    (folder / "outliers" / "text.png").write_bytes(b"GIF89a not a PNG")
    outlier = {"index": 1, "norm": 1.0, "loss": 1.0}
    line = {
        "kind": "stats",
        "step": 1,
        "examples": 1,
        "outliers": [outlier | {"image": n} for n in (name, "outliers/a.png")],
    }
    add_lines(folder, json.dumps(line))
    found = load.run(folder).outliers
    assert found[0].image is None and found[1].image.startswith(b"\x89PNG")


def test_an_image_is_only_its_pixels(folder):
    path = folder / "outliers" / "a.png"
    path.write_bytes(path.read_bytes() + b"<script>hidden</script>")
    assert b"script" not in load.run(folder).outliers[0].image


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json"])
def test_files_are_bounded_and_of_the_folder(folder, name, monkeypatch):
    monkeypatch.setattr(load, "SMALL", 1)
    monkeypatch.setattr(load, "METRICS", 1)
    with pytest.raises(BadInput, match="reads at most 1"):
        load.opened(folder, name, 1)
    shutil.move(folder / name, folder.parent / name)
    (folder / name).symlink_to(folder.parent / name)
    with pytest.raises(BadInput, match="leads out of it"):
        load.opened(folder, name, 1 << 20)


def test_another_format(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"format": 99}))
    with pytest.raises(BadInput, match="format 99"):
        load.run(folder)


# ------------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser():
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no Chromium and chromedriver here: install the packages chromium and chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tempfile.mkdtemp()
    quiet = ["quic", "background-networking", "component-update", "sync", "gpu"]
    for flag in (
        "headless",
        "no-sandbox",
        "no-first-run",
        f"user-data-dir={profile}",
        *(f"disable-{q}" for q in quiet),
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as chrome:
        yield chrome
    shutil.rmtree(profile, ignore_errors=True)


def opened(browser, path, width):
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(f"file://{path}")
    return browser


def visible(browser, selector):
    """How many of the elements take up room."""
    script = "return [...document.querySelectorAll(arguments[0])].filter(e => e.getClientRects().length).length"
    return browser.execute_script(script, selector)


@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser(browser, written, width):
    page = opened(browser, written[0], width)
    assert page.get_log("browser") == []
    assert page.execute_script("return window.pwned") is None
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    # A click on a legend hides the curve in every plot of the section, and a second one shows it again.
    button = page.find_element("css selector", ".legend button")
    key = button.get_attribute("data-key")
    curves, others = f'.series[data-key="{key}"]', f'.series:not([data-key="{key}"])'
    before, kept = visible(page, curves), visible(page, others)
    assert before >= 4 and kept > before
    button.click()
    assert visible(page, curves) == 0 and visible(page, others) == kept
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    assert visible(page, curves) == before
    # The other scale is drawn instead.
    scale = page.find_element("css selector", "button.scale")
    shown = "return arguments[0].closest('figure').querySelector('svg[data-scale]:not([hidden])').dataset.scale"
    first = page.execute_script(shown, scale)
    scale.click()
    assert {first, page.execute_script(shown, scale)} == {"log", "linear"} and first not in scale.text
    # Pointing at a plot says the curves' values there.
    find = "const r = document.querySelector('svg:not([hidden]) .hit')"
    spot = f"{find}.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]"
    page.execute_script(f"{find}; r.scrollIntoView({{block: 'center'}})")
    # Scrolling hides what was said, and is over two frames later.
    page.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    x, y = page.execute_script(spot)
    page.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})
    tip = page.find_element("id", "tip").text
    said = [r"examples seen \d+", *(rf"{name}, model cnn: [\d.]+" for name in ("adam", "eve"))]
    assert all(re.search(words, tip) for words in said), tip
    assert page.get_log("browser") == []


def test_print_and_dark(browser, written):
    page = opened(browser, written[0], 1280)
    background = "return getComputedStyle(document.body).backgroundColor"
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    assert page.execute_script(background) == "rgb(20, 23, 26)"
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": features})
    assert page.execute_script(background) == "rgb(255, 255, 255)"
    assert visible(page, "button.scale") == 0
    printed = base64.b64decode(page.execute_cdp_cmd("Page.printToPDF", {})["data"])
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    assert printed.startswith(b"%PDF") and len(printed) > 20_000
