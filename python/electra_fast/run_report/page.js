"use strict";
(() => {
  const runs = JSON.parse(document.getElementById("data").textContent);
  const WIDTH = 360, HEIGHT = 220, LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 24;
  const UNITS = { step: "step", tokens: "tokens", flops: "FLOPs", seconds: "hours" };

  const make = (name, attributes, parent, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  };
  const element = (name, parent, text, className) => {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    if (className) node.className = className;
    parent.append(node);
    return node;
  };
  const format = (value) => {
    const size = Math.abs(value);
    if (size >= 1e15) return value.toExponential(2);
    for (const [unit, mark] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (size >= unit) return +(value / unit).toPrecision(4) + mark;
    return size && size < 1e-3 ? value.toExponential(2) : String(+value.toPrecision(4));
  };
  const ticks = (low, high, count) => {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((each) => each * power >= rough) * power, found = [];
    for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(+(i * step).toPrecision(12));
    return found;
  };

  for (const section of document.querySelectorAll("section[data-kind]")) {
    const own = runs.map((run, color) => ({ ...run, color: `var(--c${color % 8})`, shown: true }))
      .filter((run) => run.kind === section.dataset.kind);
    const controls = element("div", section, undefined, "controls");
    const charts = element("div", section, undefined, "charts");
    let axis = "step", range = null;
    const xs = (series) => series.x[axis];
    const label = element("label", controls, "x axis ");
    const select = element("select", label);
    for (const name in UNITS)
      if (own.some((run) => run.train.x[name])) element("option", select, UNITS[name]).value = name;
    select.onchange = () => { axis = select.value; range = null; draw(); };
    const reset = element("button", controls, "whole range");
    reset.onclick = () => { range = null; draw(); };
    for (const run of own) {
      const box = element("label", controls), input = element("input", box);
      input.type = "checkbox";
      input.checked = true;
      input.onchange = () => { run.shown = input.checked; draw(); };
      element("span", box, undefined, "key").style.background = run.color;
      box.append(run.name);
    }
    const names = [...new Set(own.flatMap((run) => [...Object.keys(run.train.y), ...Object.keys(run.validation.y)]))];
    const ORDER = ["loss", "auc", "accuracy"];
    const rank = (name) => ORDER.findIndex((end) => name.endsWith(end)) >>> 0;  // others last
    names.sort((a, b) => rank(a) - rank(b));
    const drawn = names.map((name) => chart(name));

    function chart(name) {
      const figure = element("figure", charts);
      element("figcaption", figure, name.replaceAll("_", " "));
      const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": name }, figure);
      const tip = element("div", figure, "", "tip");
      let scale = null, start = null, band = null;

      function redraw() {
        svg.replaceChildren();
        tip.textContent = "";
        scale = null;
        const lines = [];
        for (const run of own) {
          if (!run.shown) continue;
          for (const part of ["train", "validation"]) {
            const series = run[part], y = series.y[name], x = xs(series);
            if (!y || !x) continue;
            const points = x.map((each, i) => [each, y[i]])
              .filter(([a, b]) => a !== null && b !== null && (!range || (a >= range[0] && a <= range[1])));
            if (points.length) lines.push({ run, part, points });
          }
        }
        if (!lines.length) {
          make("text", { x: WIDTH / 2, y: HEIGHT / 2, "text-anchor": "middle" }, svg, "no values here");
          return;
        }
        let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
        for (const { points } of lines)
          for (const [x, y] of points) {
            x0 = Math.min(x0, x); x1 = Math.max(x1, x); y0 = Math.min(y0, y); y1 = Math.max(y1, y);
          }
        // All charts have the same x axis.
        for (const run of own)
          for (const x of run.shown
            ? [...(xs(run.train) ?? []), ...(xs(run.validation) ?? []), ...run.warnings.map((each) => each.x[axis])] : [])
            if (x !== null) { x0 = Math.min(x0, x); x1 = Math.max(x1, x); }
        if (range) [x0, x1] = range;
        if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
        const margin = (y1 - y0) * 0.05 || Math.abs(y0) * 0.05 || 0.5;
        y0 -= margin; y1 += margin;
        const toX = (x) => LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT);
        const toY = (y) => HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM);
        const unit = axis === "seconds" ? 3600 : 1;
        for (const tick of ticks(y0, y1, 5)) {
          make("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: toY(tick), y2: toY(tick) }, svg);
          make("text", { x: LEFT - 5, y: toY(tick) + 4, "text-anchor": "end" }, svg, format(tick));
        }
        for (const tick of ticks(x0 / unit, x1 / unit, 4))
          make("text", { x: toX(tick * unit), y: HEIGHT - 8, "text-anchor": "middle" }, svg, format(tick));
        for (const { run, part, points } of lines) {
          const path = points.map(([x, y], i) => `${i ? "L" : "M"}${toX(x).toFixed(1)} ${toY(y).toFixed(1)}`).join("");
          const dash = part === "validation" ? "5 3" : "none";
          make("path", { d: path, stroke: run.color, "stroke-dasharray": dash }, svg);
          if (part === "validation" || points.length === 1)
            for (const [x, y] of points) make("circle", { cx: toX(x), cy: toY(y), r: 2.5, fill: run.color }, svg);
        }
        for (const run of own)
          for (const { x, message, step } of run.shown ? run.warnings : [])
            if (x[axis] >= x0 && x[axis] <= x1) {
              const at = toX(x[axis]), foot = HEIGHT - BOTTOM;
              const mark = make("polygon",
                { class: "warning", points: `${at - 4},${foot} ${at + 4},${foot} ${at},${foot - 8}` }, svg);
              make("title", {}, mark, `${run.name}, step ${step}: ${message}`);
            }
        scale = { x0, x1, lines, toX, toY };
      }

      const xAt = (event) => {
        const box = svg.getBoundingClientRect();
        const share = ((event.clientX - box.left) * WIDTH / box.width - LEFT) / (WIDTH - LEFT - RIGHT);
        return scale.x0 + Math.min(1, Math.max(0, share)) * (scale.x1 - scale.x0);
      };
      svg.onpointermove = (event) => {
        if (!scale) return;
        const x = xAt(event);
        tip.replaceChildren();
        svg.querySelectorAll(".hover").forEach((each) => each.remove());
        for (const { run, part, points } of scale.lines) {
          const near = points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
          make("circle",
            { class: "hover", cx: scale.toX(near[0]), cy: scale.toY(near[1]), r: 4, fill: run.color }, svg);
          const suffix = part === "validation" ? ", validation" : "";
          const place = axis === "seconds" ? `${format(near[0] / 3600)} h` : `${UNITS[axis]} ${format(near[0])}`;
          element("span", tip, `${run.name}${suffix}: ${format(near[1])} at ${place}`).style.color = run.color;
        }
        if (start !== null) {
          const [a, b] = [start, x].sort((p, q) => p - q).map(scale.toX);
          band.setAttribute("x", a);
          band.setAttribute("width", b - a);
        }
      };
      svg.onpointerdown = (event) => {
        if (!scale || event.pointerType === "touch") return;  // a touch scrolls the page
        start = xAt(event);
        band = make("rect", { class: "band", y: TOP, height: HEIGHT - TOP - BOTTOM, x: 0, width: 0 }, svg);
        svg.setPointerCapture(event.pointerId);
      };
      svg.onpointerup = (event) => {
        if (start === null) return;
        const chosen = [start, xAt(event)].sort((a, b) => a - b);
        const isWide = scale.toX(chosen[1]) - scale.toX(chosen[0]) > 5;
        start = null;
        band.remove();
        if (isWide) { range = chosen; draw(); }
      };
      svg.onpointercancel = () => { start = null; if (band) band.remove(); };
      svg.ondblclick = () => { range = null; draw(); };
      return redraw;
    }
    function draw() {
      reset.disabled = !range;
      drawn.forEach((redraw) => redraw());
    }
    draw();
  }
})();
