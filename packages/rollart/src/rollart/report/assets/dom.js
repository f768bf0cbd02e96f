// Elements, number formats and the one tooltip. Text from the run becomes text nodes, never markup.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null));
  return element;
}

function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function swatch(colour) {
  return h("span", { class: "swatch", style: `background:${colour}` });
}

function legend(items) {
  return h(
    "div",
    { class: "legend" },
    items.map(({ label, colour, value }) =>
      h("span", {}, swatch(colour), label, value === undefined ? null : h("b", {}, value)),
    ),
  );
}

function empty(text) {
  return h("div", { class: "empty" }, text);
}

// Numbers -----------------------------------------------------------------------------------------

function known(value) {
  return value !== null && value !== undefined;
}

function fixed(value, digits = 3) {
  if (!known(value)) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

// As many digits as a reader needs: 12,345 · 12.3 · 0.0123 · 1.2e-7
function short(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(1).replace("e+", "e").replace(".0e", "e");
  if (Number.isInteger(value) || size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

function power(value) {
  if (!known(value)) return "–";
  return value === 0 ? "0" : value.toExponential(1).replace("e+", "e").replace(".0e", "e");
}

function percent(value) {
  if (!known(value)) return "–";
  if (value === 0) return "0 %";
  if (value > 0 && value < 0.001) return "< 0.1 %";
  return `${fixed(100 * value, value < 0.1 ? 1 : 0)} %`;
}

function seconds(value) {
  if (!known(value)) return "–";
  if (value === 0) return "0 s";
  if (Math.abs(value) < 0.0995) return `${Number((1000 * value).toPrecision(2))} ms`;
  if (Math.abs(value) < 99.95) return `${Number(value.toPrecision(3))} s`;
  return duration(value);
}

function duration(value) {
  if (!known(value)) return "–";
  const whole = Math.round(value);
  if (whole < 60) return `${whole} s`;
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${rest} s`;
}

function bytes(value) {
  if (!known(value)) return "–";
  return value < 1 << 30 ? `${short(value / (1 << 20))} MiB` : `${fixed(value / (1 << 30), 2)} GiB`;
}

function plural(count, noun) {
  return `${short(count)} ${noun}${count === 1 ? "" : "s"}`;
}

function sum(values) {
  return values.reduce((total, value) => total + (value ?? 0), 0);
}

function mean(values) {
  const some = values.filter(known);
  return some.length ? sum(some) / some.length : null;
}

function median(values) {
  const sorted = values.filter(known).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
}

// Largest and smallest, for arrays too long to be spread into arguments.
function highest(values, start = -Infinity) {
  return values.reduce((most, value) => (known(value) && value > most ? value : most), start);
}

function lowest(values, start = Infinity) {
  return values.reduce((least, value) => (known(value) && value < least ? value : least), start);
}

// Tooltip -----------------------------------------------------------------------------------------

const tip = h("div", { class: "tip", hidden: "", "aria-hidden": "true" });

function showTip(event, head, items) {
  tip.replaceChildren(
    h("div", { class: "head" }, head),
    ...items.map(({ colour, text }) => h("div", { class: "item" }, colour ? swatch(colour) : null, h("span", {}, text))),
  );
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const space = document.documentElement.clientWidth;
  // Beside the pointer where there is room, else above or below it, always inside the window.
  const beside = [event.clientX + 18, event.clientX - width - 18].find((x) => x > 8 && x + width < space - 8);
  const above = event.clientY - height - 18 > 8 ? event.clientY - height - 18 : event.clientY + 22;
  const [left, top] =
    space > 700 && beside !== undefined
      ? [beside, Math.max(Math.min(event.clientY - height / 2, innerHeight - height - 8), 8)]
      : [Math.min(Math.max(event.clientX - width / 2, 8), space - width - 8), above];
  tip.style.transform = `translate(${left}px, ${top}px)`;
}

// Listeners for an element that shows something while a mouse is over it, or after a tap until the next one.
let leave = () => {};

function pointing(show, hide = () => {}) {
  const on = (event) => {
    leave = () => {
      hide();
      tip.hidden = true;
    };
    show(event);
  };
  const off = (event) => event.pointerType === "mouse" && leave();
  return { onpointermove: on, onpointerdown: on, onpointerleave: off };
}

addEventListener("pointerdown", () => leave(), { capture: true });
addEventListener("scroll", () => leave(), { passive: true });
