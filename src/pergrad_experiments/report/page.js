"use strict";
const tip = document.getElementById("tip");
const short = x => x === 0 ? "0" : Math.abs(x) >= 1e6 || Math.abs(x) < 1e-4 ? x.toExponential(2) : String(+x.toPrecision(4));

// A legend's entry hides its curve, in every plot of the section.
for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const section = button.closest("section"), key = button.dataset.key;
    const show = button.getAttribute("aria-pressed") === "false";
    for (const other of section.querySelectorAll(`.legend button[data-key="${key}"]`)) other.setAttribute("aria-pressed", show);
    for (const series of section.querySelectorAll(`.series[data-key="${key}"]`)) series.classList.toggle("off", !show);
    tip.hidden = true;
  });
}

// Logarithmic or linear: both are there, one is hidden.
for (const button of document.querySelectorAll("button.scale")) {
  button.addEventListener("click", () => {
    const drawings = button.closest("figure").querySelectorAll("svg[data-scale]");
    for (const drawing of drawings) {
      drawing.toggleAttribute("hidden");
      if (!drawing.hasAttribute("hidden")) button.textContent = `${drawing.dataset.scale} scale`;
    }
  });
}

function place(event, words) {
  tip.textContent = words;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const x = event.clientX + 14 + box.width > innerWidth ? event.clientX - 14 - box.width : event.clientX + 14;
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${Math.min(Math.max(4, event.clientY + 14), innerHeight - box.height - 4)}px`;
}

// Of each curve: where its points are, and what they stand for.
const parsed = new WeakMap();
function points(series) {
  if (!parsed.has(series)) {
    const pixels = series.querySelector(".line").getAttribute("d").slice(1).split("L").map(p => p.split(",").map(Number));
    const values = series.dataset.v.split(";").map(p => p.split(",").map(Number));
    parsed.set(series, pixels.map((p, i) => ({px: p[0], py: p[1], x: values[i][0], y: values[i][1]})));
  }
  return parsed.get(series);
}

function hover(event) {
  const hit = event.target.closest(".hit"), single = event.target.closest("[data-tip]");
  for (const line of document.querySelectorAll(".cursor")) line.remove();
  if (single) return place(event, single.dataset.tip);
  if (!hit) { tip.hidden = true; return; }
  const svg = hit.ownerSVGElement;
  const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  const near = [];
  for (const series of svg.querySelectorAll(".series[data-v]:not(.off)")) {
    let best = null;
    for (const p of points(series)) if (!best || Math.abs(p.px - at.x) < Math.abs(best.px - at.x)) best = p;
    if (best) near.push({label: series.dataset.label, ...best});
  }
  if (!near.length) { tip.hidden = true; return; }
  const x = near.reduce((a, b) => Math.abs(a.px - at.x) <= Math.abs(b.px - at.x) ? a : b);
  const rows = near.filter(p => Math.abs(p.px - x.px) < 12).sort((a, b) => a.py - b.py).map(p => `${p.label}: ${short(p.y)}`);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [name, value] of [["x1", x.px], ["x2", x.px], ["y1", hit.y.baseVal.value],
                               ["y2", hit.y.baseVal.value + hit.height.baseVal.value]]) line.setAttribute(name, value);
  line.setAttribute("class", "cursor");
  svg.insertBefore(line, hit);
  place(event, `${svg.closest("figure").dataset.x} ${short(x.x)}\n${rows.join("\n")}`);
}
document.addEventListener("pointermove", hover);
document.addEventListener("pointerdown", hover);
document.addEventListener("scroll", () => { tip.hidden = true; }, {passive: true});
