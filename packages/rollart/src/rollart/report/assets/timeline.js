// One row per resource over one iteration. Spans can be pointed at or tapped, with a few pixels of tolerance.
"use strict";

const KIND_COLOURS = new Map([
  ["controller", "var(--grey)"],
  ["gen", "var(--blue)"],
  ["env", "var(--green)"],
  ["reward", "var(--gold)"],
  ["train", "var(--orange)"],
  ["push", "var(--purple)"],
  ["pull", "var(--teal)"],
  ["commit", "var(--red)"],
]);

function timelineHeight(row, labelled) {
  const lanes = row.level.length ? 40 : Math.max(18, 9 * row.lanes);
  return { row, height: lanes + (labelled ? 18 : 0), lanes, label: labelled ? 18 : 0 };
}

function timeline(shown, partColour) {
  const narrow = matchMedia("(max-width: 700px)").matches;
  const layout = shown.rows.map((row) => timelineHeight(row, narrow));
  let height = 26;
  for (const place of layout) {
    place.top = height + place.label;
    height += place.height + 10;
  }
  height += 34;
  const colour = (row, name) =>
    row.kind === "controller" ? partColour(name) : KIND_COLOURS.get(row.kind) ?? "var(--brown)";
  return plot(height, `What each resource did in iteration ${shown.step}`, (svg, width) => {
    const gutter = narrow ? 0 : 12 + 7.2 * Math.min(highest(shown.rows.map((row) => row.resource.length), 6), 22);
    const box = { left: gutter, right: width - (narrow ? 1 : 52), top: 20, bottom: height - 34 };
    const px = (at) => box.left + (at / shown.length) * (box.right - box.left);
    timelineFrame(svg, shown, box, px, height);
    for (const place of layout) timelineRow(svg, place, box, px, colour, narrow);
    timelineHover(svg, shown, layout, box, px, colour);
  });
}

function timelineFrame(svg, shown, box, px, height) {
  const unit = shown.length < 0.5 ? { by: 1000, name: "milliseconds" } : { by: 1, name: "seconds" };
  for (const tick of ticks(0, shown.length * unit.by, (box.right - box.left) / 90)) {
    const x = px(tick / unit.by);
    const anchor = x < 8 ? "start" : x > box.right - 8 ? "end" : "middle";
    svg.append(
      s("line", { class: "gridline", x1: x, x2: x, y1: box.top, y2: box.bottom }),
      s("text", { x, y: box.bottom + 16, "text-anchor": anchor }, short(Number(tick.toPrecision(6)))),
    );
  }
  svg.append(s("text", { x: box.right, y: height - 2, "text-anchor": "end" }, `${unit.name} since the iteration began`));
  if (box.right < svg.clientWidth - 40) {
    svg.append(s("text", { x: box.right + 52, y: 12, "text-anchor": "end" }, "busy"));
  }
  for (const [start, end] of shown.suspended) {
    const [x0, x1] = [px(start), Math.max(px(end), px(start) + 2)];
    const anchor = x0 > box.right - 150 ? "end" : "start";
    svg.append(
      s("rect", { class: "band", x: x0, y: box.top, width: x1 - x0, height: box.bottom - box.top }),
      s("text", { class: "strong", x: anchor === "end" ? x1 : x0, y: 12, "text-anchor": anchor }, `suspended ${seconds(end - start)}`),
    );
  }
}

function timelineRow(svg, { row, top, lanes }, box, px, colour, narrow) {
  const name = row.resource.length > 24 ? `${row.resource.slice(0, 23)}…` : row.resource;
  const busy = percent(row.busy);
  if (narrow) {
    svg.append(
      s("text", { class: "strong", x: 0, y: top - 5 }, name),
      s("text", { x: box.right, y: top - 5, "text-anchor": "end" }, `${busy} busy`),
    );
  } else {
    svg.append(
      s("text", { class: "strong", x: box.left - 10, y: top + lanes / 2 + 4, "text-anchor": "end" }, name),
      s("text", { x: box.right + 52, y: top + lanes / 2 + 4, "text-anchor": "end" }, busy),
    );
  }
  svg.append(s("line", { class: "axis", x1: box.left, x2: box.right, y1: top + lanes + 0.5, y2: top + lanes + 0.5 }));
  const thick = lanes / row.lanes;
  for (const bar of row.bars) {
    const width = Math.max(px(bar.end) - px(bar.start) - 0.5, 1);
    const y = top + bar.lane * thick;
    svg.append(s("rect", { class: "span", x: px(bar.start), y, width, height: thick - 1, rx: Math.min(2, width / 2), fill: colour(row, bar.name) }));
  }
  if (row.level.length) timelineLevel(svg, row, top, lanes, box, px, colour(row, ""));
  for (const mark of row.marks) {
    svg.append(s("line", { class: "cursor", x1: px(mark.at), x2: px(mark.at), y1: top - 2, y2: top + lanes }));
  }
}

// A resource with many spans at a time: how many ran, as an area.
function timelineLevel(svg, row, top, lanes, box, px, colour) {
  const most = highest(row.level.map(([, n]) => n), 1);
  const y = (n) => top + lanes - (n / most) * (lanes - 12);
  let d = `M${px(row.level[0][0])} ${top + lanes}`;
  row.level.forEach(([at, n], i) => {
    const until = row.level[i + 1]?.[0] ?? at;
    d += `L${px(at).toFixed(1)} ${y(n).toFixed(1)}L${px(until).toFixed(1)} ${y(n).toFixed(1)}`;
  });
  d += `L${px(row.level[row.level.length - 1][0])} ${top + lanes}Z`;
  svg.append(
    s("path", { class: "span", d, fill: colour, "fill-opacity": 0.75 }),
    s("text", { x: box.left + 4, y: top + 9 }, `up to ${most} at a time`),
  );
}

function timelineHover(svg, shown, layout, box, px, colour) {
  const reach = (5 * shown.length) / (box.right - box.left);
  hover(svg, box, (event, pixel, cursor) => {
    const at = Math.min(Math.max(((pixel - box.left) / (box.right - box.left)) * shown.length, 0), shown.length);
    const y = event.clientY - svg.getBoundingClientRect().top;
    cursor.replaceChildren(s("line", { class: "cursor", x1: px(at), x2: px(at), y1: box.top, y2: box.bottom }));
    const place = layout.find(({ top, lanes }) => y >= top - 8 && y <= top + lanes + 8);
    if (!place) return showTip(event, seconds(at), []);
    const { row, top, lanes } = place;
    const lane = Math.min(Math.max(Math.floor(((y - top) / lanes) * row.lanes), 0), row.lanes - 1);
    const distance = (bar) => Math.max(bar.start - at, at - bar.end, 0) / reach + Math.abs(bar.lane - lane) / 4;
    const bar = row.bars.reduce((best, one) => (best === null || distance(one) < distance(best) ? one : best), null);
    if (bar && distance(bar) < 1) {
      const lines = [`${row.resource}, from ${seconds(Math.max(bar.start, 0))} for ${seconds(bar.seconds)}`, ...bar.details];
      showTip(event, bar.name, lines.map((text, i) => ({ colour: i ? null : colour(row, bar.name), text })));
    } else {
      const level = row.level.findLast(([from]) => from <= at);
      const mark = row.marks.find((one) => Math.abs(one.at - at) < reach);
      const text = mark ? mark.name : row.level.length ? `${level ? level[1] : 0} running` : "idle";
      showTip(event, seconds(at), [{ colour: colour(row, ""), text: `${row.resource}: ${text}` }]);
    }
  });
}
