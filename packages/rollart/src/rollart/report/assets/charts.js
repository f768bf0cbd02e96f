// Line, stacked and bar charts. Each draws itself for the width it has, so that text keeps its size on a phone.
"use strict";

// Calls draw(svg, width) now and whenever the width changes.
function plot(height, label, draw) {
  const svg = s("svg", { height, role: "img", "aria-label": label });
  const host = h("div", { class: "plot" }, svg);
  let drawn = 0;
  const redraw = () => {
    const width = Math.floor(host.clientWidth);
    if (width === drawn || width === 0) return;
    drawn = width;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    draw(svg, width);
  };
  new ResizeObserver(() => requestAnimationFrame(redraw)).observe(host);
  return host;
}

// Round numbers that cover [low, high].
function ticks(low, high, count) {
  const span = high - low || 1;
  const rough = span / Math.max(count, 1);
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step + 0); // + 0: no -0
  return found;
}

function powers(low, high) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const stride = Math.ceil((last - first) / 5) || 1;
  const found = [];
  for (let exponent = first; exponent <= last; exponent += stride) found.push(10 ** exponent);
  return found;
}

// The vertical scale of a chart: {low, high, ticks, at(value) in 0..1}
function scale(values, { log = false, min, max } = {}) {
  if (log) {
    const positive = values.filter((value) => value > 0);
    const marks = powers(lowest(positive, 1e-6), highest(positive, 1e-6));
    if (marks.length === 1) marks.push(marks[0] * 10);
    const [low, high] = [marks[0], Math.max(marks[marks.length - 1], highest(positive, 1e-6))];
    const at = (value) => (value > low ? Math.log(value / low) / Math.log(high / low) : 0);
    return { low, high, ticks: marks, at };
  }
  let low = min ?? lowest(values, 0);
  let high = max ?? highest(values, low);
  if (low === high) high = low + (Math.abs(low) || 1);
  const pad = 0.04 * (high - low);
  const marks = ticks(low, high, 5);
  if (min === undefined && low < 0) low -= pad;
  if (max === undefined) high += pad;
  return { low, high, ticks: marks, at: (value) => (value - low) / (high - low) };
}

// Axes, gridlines and labels; returns the functions from data to pixels.
function axes(svg, width, height, x, y) {
  const texts = y.scale.ticks.map(y.format);
  const left = 10 + 7 * highest(texts.map((text) => text.length), 2);
  const box = { left, right: width - 10, top: y.label ? 24 : 8, bottom: height - (x.label ? 38 : 22) };
  const py = (value) => box.bottom - y.scale.at(value) * (box.bottom - box.top);
  const px = (value) => box.left + ((value - x.low) / (x.high - x.low || 1)) * (box.right - box.left);
  y.scale.ticks.forEach((tick, i) => {
    svg.append(
      s("line", { class: tick && i ? "gridline" : "axis", x1: box.left, x2: box.right, y1: py(tick), y2: py(tick) }),
      s("text", { x: box.left - 8, y: py(tick) + 4, "text-anchor": "end" }, texts[i]),
    );
  });
  for (const tick of x.ticks(box.right - box.left)) {
    const near = px(tick) > box.right - 16 ? "end" : "middle";
    svg.append(s("text", { x: px(tick), y: box.bottom + 17, "text-anchor": near }, x.format(tick)));
  }
  if (y.label) svg.append(s("text", { x: 0, y: 11 }, y.label));
  if (x.label) svg.append(s("text", { x: box.right, y: height - 4, "text-anchor": "end" }, x.label));
  return { ...box, px, py };
}

// Pointer over the plot area: at(event, pixel x, cursor) chooses what is meant and shows it.
function hover(svg, box, at) {
  const cursor = s("g", { "pointer-events": "none" });
  const area = s("rect", {
    x: box.left,
    y: box.top,
    width: Math.max(box.right - box.left, 0),
    height: Math.max(box.bottom - box.top, 0),
    fill: "transparent",
    ...pointing(
      (event) => at(event, event.clientX - svg.getBoundingClientRect().left, cursor),
      () => cursor.replaceChildren(),
    ),
  });
  svg.append(cursor, area);
}

function nearest(points, x) {
  let best = null;
  for (const point of points) {
    if (known(point[1]) && (best === null || Math.abs(point[0] - x) < Math.abs(best[0] - x))) best = point;
  }
  return best;
}

function path(points, px, py) {
  let [d, pen] = ["", "M"];
  for (const [x, y] of points) {
    if (known(y) && known(x)) d += `${pen}${px(x).toFixed(1)} ${py(y).toFixed(1)}`;
    pen = known(y) && known(x) ? "L" : "M";
  }
  return d;
}

// series: [{label, colour, points: [[x, y|null]], dots, faint}], rules: [{y, label}]
function lineChart({ label, x, y, series, rules = [], height = 240 }) {
  const shown = series.filter((one) => one.points.some((point) => known(point[0]) && known(point[1])));
  const xs = shown.flatMap((one) => one.points.map((point) => point[0])).filter(known);
  const ys = shown.flatMap((one) => one.points.map((point) => point[1])).filter(known);
  const low = lowest(xs);
  const high = Math.max(highest(xs), low + 1);
  const whole = x.whole ? (list) => list.filter(Number.isInteger) : (list) => list;
  const horizontal = { low, high, label: x.label, format: x.format, ticks: (space) => whole(ticks(low, high, space / 70)) };
  const vertical = { label: y.label, format: y.format, scale: scale([...ys, ...rules.map((rule) => rule.y)], y) };
  return plot(height, label, (svg, width) => {
    const box = axes(svg, width, height, horizontal, vertical);
    for (const rule of rules) {
      const at = box.py(rule.y);
      svg.append(
        s("line", { class: "rule", x1: box.left, x2: box.right, y1: at, y2: at }),
        s("text", { x: box.right, y: at - 5, "text-anchor": "end" }, rule.label),
      );
    }
    for (const { points, colour, dots, faint } of shown) {
      svg.append(s("path", { class: faint ? "curve faint" : "curve", stroke: colour, d: path(points, box.px, box.py) }));
      if (dots || points.length === 1) {
        for (const [px, py] of points.filter((point) => known(point[1]))) {
          svg.append(s("circle", { class: "dot", cx: box.px(px), cy: box.py(py), r: 4, fill: colour }));
        }
      }
    }
    hover(svg, box, (event, pixel, cursor) => {
      const here = low + ((pixel - box.left) / (box.right - box.left)) * (high - low);
      const found = shown.map((one) => ({ ...one, point: nearest(one.points, here) }));
      const x0 = nearest(found.map((one) => [one.point[0], 0]), here)[0];
      const close = (one) => Math.abs(box.px(one.point[0]) - box.px(x0)) < 12;
      cursor.replaceChildren(
        s("line", { class: "cursor", x1: box.px(x0), x2: box.px(x0), y1: box.top, y2: box.bottom }),
        ...found.filter(close).map(({ point, colour }) =>
          s("circle", { class: "dot", cx: box.px(point[0]), cy: box.py(point[1]), r: 4.5, fill: colour }),
        ),
      );
      const items = found.filter(close).map((one) => ({ colour: one.colour, text: `${one.label}: ${y.format(one.point[1])}` }));
      showTip(event, `${x.name} ${x.format(x0)}`, items);
    });
  });
}

// One column per iteration; columns narrower than 3 pixels are averaged in runs of equal length.
// parts: [{label, colour, values}]
function stackChart({ label, steps, parts, height = 260 }) {
  return plot(height, label, (svg, width) => {
    const size = Math.ceil((3 * steps.length) / (width - 60));
    const bins = [];
    for (let from = 0; from < steps.length; from += size) {
      const to = Math.min(from + size, steps.length);
      const values = parts.map((part) => sum(part.values.slice(from, to)) / (to - from));
      bins.push({ first: steps[from], last: steps[to - 1], values, total: sum(values) });
    }
    const vertical = { label: "seconds", format: short, scale: scale(bins.map((bin) => bin.total), { min: 0 }) };
    const index = { low: -0.5, high: bins.length - 0.5, label: "iteration", format: (i) => short(names.get(i)), ticks: () => [...names.keys()] };
    const round = ticks(steps[0], steps[steps.length - 1], width / 80).filter((step) => steps.includes(step));
    const names = new Map(round.map((step) => [bins.findIndex((bin) => step <= bin.last), step]));
    const box = axes(svg, width, height, index, vertical);
    const pitch = (box.right - box.left) / bins.length;
    const thick = Math.min(Math.max(pitch - (pitch > 5 ? 1.5 : 0.25), 1), 56);
    bins.forEach((bin, i) => {
      let below = 0;
      bin.values.forEach((value, p) => {
        const [y1, y0] = [box.py(below + value), box.py(below)];
        below += value;
        if (value > 0) {
          svg.append(s("rect", { x: box.px(i) - thick / 2, y: y1, width: thick, height: y0 - y1, fill: parts[p].colour }));
        }
      });
    });
    hover(svg, box, (event, pixel, cursor) => {
      const i = Math.min(Math.max(Math.floor((pixel - box.left) / pitch), 0), bins.length - 1);
      const { first, last, values, total } = bins[i];
      const y = box.py(total);
      cursor.replaceChildren(
        s("rect", { class: "halo", x: box.px(i) - thick / 2, y, width: thick, height: box.bottom - y, stroke: "var(--ink)" }),
      );
      const name = first === last ? `iteration ${first}` : `iterations ${first}–${last}, mean`;
      const items = parts
        .map((part, p) => ({ colour: part.colour, text: `${part.label}: ${seconds(values[p])}`, value: values[p] }))
        .filter((item) => item.value > 0);
      showTip(event, `${name}: ${seconds(total)}`, items.reverse());
    });
  });
}

// Counts by whole number, one bar per group side by side. groups: [{label, colour, counts: [[value, n]]}]
function barChart({ label, xLabel, groups, height = 220 }) {
  const values = [...new Set(groups.flatMap((group) => group.counts.map(([value]) => value)))].sort((a, b) => a - b);
  const share = groups.map((group) => {
    const total = sum(group.counts.map(([, n]) => n)) || 1;
    const by = new Map(group.counts.map(([value, n]) => [value, n / total]));
    return values.map((value) => by.get(value) ?? 0);
  });
  return plot(height, label, (svg, width) => {
    const horizontal = { low: -0.5, high: values.length - 0.5, label: xLabel, format: (i) => short(values[i]) };
    horizontal.ticks = (space) => values.map((_, i) => i).filter((i) => i % Math.ceil((values.length * 30) / space) === 0);
    const high = highest(share.flat(), 0);
    const vertical = { label: "share of samples", format: (v) => `${fixed(100 * v, 0)} %`, scale: scale([high], { min: 0, max: Math.min(1.05, high * 1.2) }) };
    const box = axes(svg, width, height, horizontal, vertical);
    const thick = Math.min((0.7 * (box.right - box.left)) / values.length / groups.length, 64);
    groups.forEach((group, g) => {
      share[g].forEach((part, i) => {
        const x = box.px(i) + (g - groups.length / 2) * thick;
        const y = box.py(part);
        svg.append(s("rect", { x: x + 1, y, width: Math.max(thick - 2, 1), height: box.bottom - y, fill: group.colour, rx: 2 }));
        if (part > 0 && thick > 34) {
          svg.append(s("text", { class: "strong", x: x + thick / 2, y: y - 5, "text-anchor": "middle" }, percent(part)));
        }
      });
    });
    hover(svg, box, (event, pixel) => {
      const i = Math.min(Math.max(Math.floor(((pixel - box.left) / (box.right - box.left)) * values.length), 0), values.length - 1);
      const items = groups.map((group, g) => {
        const n = group.counts.find(([value]) => value === values[i])?.[1] ?? 0;
        return { colour: group.colour, text: `${group.label}: ${short(n)} samples, ${percent(share[g][i])}` };
      });
      showTip(event, `${xLabel} ${short(values[i])}`, items);
    });
  });
}

// A whole cut into its parts. items: [{label, colour, value}]
function shareBar(items, format) {
  const total = sum(items.map((item) => item.value)) || 1;
  return h(
    "div",
    { class: "share", role: "img", "aria-label": items.map((item) => `${item.label} ${format(item.value)}`).join(", ") },
    items
      .filter((item) => item.value > 0)
      .map((item) =>
        h("span", {
          style: `width:${(100 * item.value) / total}%;background:${item.colour}`,
          ...pointing((event) =>
            showTip(event, item.label, [{ text: `${format(item.value)}, ${percent(item.value / total)}` }]),
          ),
        }),
      ),
  );
}
